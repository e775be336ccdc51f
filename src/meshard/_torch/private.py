"""Private names of torch, and names that differ between its supported versions.

``import meshard`` works without any private name. If one is gone, meshard either takes a slower
way, or raises an AttributeError with the name at its first use.
``tests/torch/test_missing_names.py`` removes each name to check this.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


def _find(path: str) -> Any:
    """Return what a dotted name stands for; None if it is gone."""
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _or_error(path: str) -> Callable[..., Any]:
    """Return what a dotted name stands for, or a function that raises an error that names it."""

    def is_gone(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"torch {torch.__version__} has no {path}, which meshard needs here.")

    return _find(path) or is_gone


def too_new(what: str) -> NotImplementedError:
    """Return the error for something that a newer torch has added."""
    return NotImplementedError(
        f"{what}, which torch {torch.__version__} has, is not built yet in meshard; leave it out."
    )


# --- torch.compile -------------------------------------------------------------------------

_set_strategy = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy = _find("torch._C._dynamo.eval_frame._FrameExecStrategy")
_Action = _find("torch._C._dynamo.eval_frame._FrameAction")
_CAN_MARK_CODE = None not in (_set_strategy, _Strategy, _Action)


def skip_dynamo(function: Function, *, recursive: bool = True) -> Function:
    """Make ``torch.compile`` run ``function``, and what it calls, uncompiled.

    Dynamo inspects every frame that Python is about to run, also those of hooks around a compiled
    module. A mark on the code object makes dynamo skip the frame of ``function`` and all below. An
    attribute of ``function`` makes dynamo end a graph where a compiled function calls it. Unlike
    the public ``torch.compiler.disable``, which adds a wrapper of 0.9 us, this costs nothing per
    call.
    """
    if not _CAN_MARK_CODE:
        disabled: Function = torch.compiler.disable(function, recursive=recursive)
        return disabled
    below = _Action.SKIP if recursive else _Action.DEFAULT
    _set_strategy(function.__code__, _Strategy(_Action.SKIP, below))
    # The types of functions declare no such attributes.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "the border of a meshard unit"  # type: ignore[attr-defined]
    return function


# Like ``skip_dynamo``, but what the function calls may be compiled.
skip_dynamo_once = functools.partial(skip_dynamo, recursive=False)


def before_compiling(function: Callable[[Any], None]) -> None:
    """Make ``torch.compile`` call ``function`` each time before it looks at a frame's tensors.

    ``torch._dynamo.reset()`` undoes this call, so it must be repeated after a reset.
    """
    handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    if handler is not None and function not in handler.start_callbacks:
        handler.register_start_callback(function)


# --- autograd ------------------------------------------------------------------------------

# Calls a function when the present backward ends; torch's own DDP does so too.
queue_backward_callback: Callable[[Callable[[], None]], None] = _or_error(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
# The id of the graph task (run of the autograd engine) of this thread; -1 outside of a backward.
graph_task_id: Callable[[], int] = _or_error("torch._C._current_graph_task_id")
# Whether the backward that is running keeps its graph: its ``retain_graph``, which defaults to
# ``create_graph``.
keeps_graph: Callable[[], bool] = _or_error("torch._C._autograd._get_current_graph_task_keep_graph")
# The sequence number that the next autograd node of this thread will get. Numbers count up.
next_node: Callable[[], int] = _or_error("torch._C._autograd._get_sequence_nr")
_running_node: Callable[[], Any] = _or_error("torch._C._current_autograd_node")
_will_execute: Callable[[Any], bool] = _or_error("torch._C._will_engine_execute_node")


def running_node() -> int:
    """Return the sequence number of the node that this thread runs; -1 outside of a backward."""
    node = _running_node()
    return -1 if node is None else int(node._sequence_nr())


def accumulates_any(params: Iterable[torch.Tensor]) -> bool:
    """Whether the present graph task adds to the ``.grad`` of any leaf in ``params``.

    The answer is True also where it is uncertain. It is False only if the graph task executes none
    of these leaves, and skips at least one node of the graph. This is the case for
    ``torch.autograd.grad`` and for a backward with ``inputs``, which execute a part of the graph.
    """
    with torch.enable_grad():
        for param in params:
            if param.requires_grad and _runs(torch.autograd.graph.get_gradient_edge(param).node):
                return True
    return not _leaves_out_any(_running_node())


def _runs(node: Any) -> bool:
    try:
        return _will_execute(node)
    except RuntimeError:  # torch raises for a leaf whose gradient torch.autograd.grad returns
        return False


def _leaves_out_any(start: Any) -> bool:
    """Whether the present graph task skips any node that is reachable from ``start``."""
    seen, stack = {start}, [start]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            if not _runs(node):
                return True
            seen.add(node)
            stack.append(node)
    return False


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    Garbage collection is off meanwhile: if ``sys._current_frames`` starts one, Python 3.11 may
    deadlock (python/cpython#106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def number_of(tensor: torch.Tensor) -> int:
    """Return the sequence number of the autograd node that made ``tensor``; -1 if none did."""
    node = tensor.grad_fn
    return -1 if node is None else node._sequence_nr()


HooksOf = Callable[[torch.Tensor], Mapping[int, Callable[..., Any]] | None]
# The hooks of ``tensor.register_hook``; None or empty if there are none.
gradient_hooks_of: HooksOf = attrgetter("_backward_hooks")
# The hooks of ``tensor.register_post_accumulate_grad_hook``; None or empty if there are none.
accumulation_hooks_of: HooksOf = attrgetter("_post_accumulate_grad_hooks")


def is_in_compiled_autograd() -> bool:
    """Whether ``torch._dynamo.config.compiled_autograd`` has compiled the backward that runs."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


# --- torch's distributed autograd, optimizers in backward, and DDP ---------------------------

_has_rpc_agent: Callable[[], bool] = _find(
    "torch._C._distributed_rpc._is_current_rpc_agent_set"
) or (lambda: False)
_distributed_autograd = _find("torch._C._distributed_autograd")


def is_distributed_backward() -> bool:
    """Whether ``torch.distributed.autograd.backward()`` is running, in whatever thread."""
    if not _has_rpc_agent():
        return False
    return bool(_distributed_autograd._get_debug_info()["num_current_backward_passes"])


def has_backward_optimizers() -> bool:
    """Whether torch's ``_apply_optimizer_in_backward`` was called for any live parameter."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return bool(getattr(module, "param_to_acc_grad_map", ()))


def has_backward_optimizer(param: torch.Tensor) -> bool:
    """Whether torch's ``_apply_optimizer_in_backward`` was called for ``param``."""
    return hasattr(param, "_in_backward_optimizers")


def is_reduced_by_ddp(module: nn.Module) -> bool:
    """Whether a running DistributedDataParallel contains ``module`` and reduces all parameters."""
    # If several threads run DDP, ``_active_ddp_module`` may be a DDP whose forward is over. Unless
    # it contains ``module``, the last line ignores it.
    ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or ddp.parameters_to_ignore:
        return False
    return any(each is module for each in ddp.module.modules())


# --- tensors -------------------------------------------------------------------------------

_is_wrapped = _find("torch._C._functorch.is_functorch_wrapped_tensor") or (lambda _: False)
_inside_of = _or_error("torch._C._functorch.get_unwrapped")
_transforms = _find("torch._C._functorch.get_interpreter_stack") or (lambda: None)
_suspend_transforms = _or_error("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
# Transforms that run no backward themselves. The user may run a backward on their outputs.
_FORWARD_ONLY = ("TransformType.Vmap", "TransformType.Jvp")
_num_modes = _find("torch._C._len_torch_dispatch_stack") or (lambda: 0)
_mode_at = _or_error("torch._C._get_dispatch_stack_at")
_suspend_modes = _or_error("torch.utils._python_dispatch._disable_current_modes")
_SELECTIVE = tuple(  # the modes of selective checkpoints (forward, recomputation) that torch has
    mode
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if (mode := _find(f"torch.utils.checkpoint.{name}")) is not None
)


def outside_of_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``tensor`` wraps inside ``torch.vmap`` and ``torch.func.jvp``.

    Hooks belong on the wrapped tensor: it is the one whose hooks autograd calls.
    """
    while _is_wrapped(tensor):
        tensor = _inside_of(tensor)
    return tensor


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` is under way."""
    return bool(_transforms())


def without_modes(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call ``function`` outside of modes that must not see operations of the engine.

    These modes are ``torch.vmap`` and ``torch.func.jvp``, inside of which tensors have no memory;
    and selective checkpoints, which count operations and expect the same ones when they recompute.
    Inside any other transform, such as ``torch.func.grad``, no transform is suspended.
    """
    if _num_modes() and any(isinstance(_mode_at(i), _SELECTIVE) for i in range(_num_modes())):
        with _suspend_modes():
            return function(*args, **kwargs)
    transforms = _transforms()
    if not transforms or any(str(each.key()) not in _FORWARD_ONLY for each in transforms):
        return function(*args, **kwargs)
    with _suspend_transforms():
        return function(*args, **kwargs)


def tangents_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the forward derivatives of those ``tensors`` that have one."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return []
    duals = map(forward_ad.unpack_dual, tensors)
    return [dual.tangent for dual in duals if dual.tangent is not None]


# The version of a tensor. Edits in place raise it, except foreach kernels on DTensors.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# The tensor of which a tensor is a view, according to autograd; None if it is no view.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")


def keeping_version(*tensors: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writing to ``tensors`` does not count as a change of them.

    Without it, autograd would take the filling of an unsharded parameter for an in-place change of
    a tensor that it has saved.
    """
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensors)


# A context in which torch does not look up ``__torch_function__`` for each attribute of a DTensor.
# The look-up takes twice as long as reading the attribute, and the method of DTensor does nothing.
# Only for loops that call no user code.
without_torch_function: Callable[[], AbstractContextManager[None]] = (
    _find("torch._C.DisableTorchFunctionSubclass") or contextlib.nullcontext
)
# A context that sees every operator that is called inside, collectives too.
DispatchMode: Any = _or_error("torch.utils._python_dispatch.TorchDispatchMode")
# Calls ``target.copy_(source)`` for each pair of two lists, in one call of an operator.
foreach_copy_ = _or_error("torch._foreach_copy_")
# ``tensor.mul_(factor)`` for each, in a fifth of the time that single calls take.
foreach_mul_ = _or_error("torch._foreach_mul_")
# ``chunk_cat(tensors, 0, num_chunks)`` views each tensor as ``[num_chunks, -1]`` and concatenates
# these along dim 1, if each size of dim 0 is a multiple of num_chunks. Others torch pads with
# zeros.
chunk_cat = _or_error("torch._chunk_cat")
# Multiplies plain tensors by ``inv_scale`` in place. Sets ``found_inf`` to 1 if one was not finite.
unscale_each = _or_error("torch._amp_foreach_non_finite_check_and_unscale_")

# --- profiler, modules, pytree -------------------------------------------------------------

is_profiling: Callable[[], bool] = _find("torch.autograd._profiler_enabled") or (lambda: False)
# The code of a module's call around its forward, which has the module as ``self``.
_module_call = (_find("torch.nn.Module._call_impl") or torch.nn.Module.__call__).__code__
# The code of calls around a forward, and the name of the variable in it that has the module.
call_codes = {_module_call: "self"}


def called_in(frame: FrameType) -> object:
    """Return the module that ``frame`` is a call of; None if ``frame`` is something else."""
    name = call_codes.get(frame.f_code)
    return None if name is None else frame.f_locals.get(name)


def calls_on_stack(modules: Sequence[nn.Module]) -> int:
    """Return how many calls of ``modules`` this thread is running."""
    called = (called_in(frame) for frame, _ in traceback.walk_stack(sys._getframe()))
    return sum(any(each is module for module in modules) for each in called)


def is_of_to_empty(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is what ``module.to_empty()`` applies to parameters and buffers."""
    return getattr(fn, "__qualname__", "").startswith(f"{nn.Module.to_empty.__qualname__}.")


# Flatten nested containers that are registered with torch's pytree, and build them again.
tree_flatten = _or_error("torch.utils._pytree.tree_flatten")
tree_map = _or_error("torch.utils._pytree.tree_map")
tree_unflatten = _or_error("torch.utils._pytree.tree_unflatten")


_dispatch_mode_at = _or_error("torch._C._get_dispatch_mode")


_resolve_group = _or_error("torch.distributed.distributed_c10d._resolve_process_group")


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the process group that functional collectives know by a name."""
    group: dist.ProcessGroup = _resolve_group(name)
    return group


def is_faking() -> bool:
    """Return whether torch's FakeTensorMode is active, as inside DTensor's sharding propagation."""
    return _dispatch_mode_at(torch._C._TorchDispatchModeKey.FAKE) is not None


def foreach_devices() -> list[tuple[Any, str, Callable[[], list[str]]]]:
    """Return where torch keeps the function that lists the devices of foreach optimizers.

    Each place is a module, a name in it, and the function found there.
    """
    name = "_get_foreach_kernels_supported_devices"
    # Not _find: ``torch.optim`` hides its module ``optimizer``.
    modules = map(sys.modules.get, ("torch.utils._foreach_utils", "torch.optim.optimizer"))
    return [(each, name, getattr(each, name)) for each in modules if hasattr(each, name)]


_device_constructors = _find("torch.utils._device._device_constructors") or frozenset


_device_modes = _find("torch.utils._device")


def default_device_of(func: Callable[..., Any]) -> torch.device | None:
    """Return the default device, if the user has set one and ``func`` makes tensors on it."""
    device: torch.device | None = getattr(_device_modes, "CURRENT_DEVICE", None)
    return device if device is not None and func in _device_constructors() else None


_FAKE_PG = "torch.testing._internal.distributed.fake_pg"  # takes 0.1 s, so imported when used


def fake_store() -> Any:
    """Return the store of a process group of the backend ``fake``, which never communicates.

    Its collectives leave their outputs unfilled. The import registers the backend.
    """
    return importlib.import_module(_FAKE_PG).FakeStore()


# --- torch's fully_shard -------------------------------------------------------------------

# Not _find: the package also has a function ``contract``, which hides the module.
_contract = sys.modules.get("torch.distributed._composable.contract")
_registry = getattr(_contract, "REGISTRY_KEY", None)


# torch's own function, even after ``patch_torch()``. Pipelines call its ``state(module)``.
_fully_shard: Any = torch.distributed.fsdp.fully_shard
state_of = getattr(_fully_shard, "state", lambda _: None)
# The key in a module's ``__dict__`` under which ``state_of`` looks.
_STATES = getattr(_contract, "STATE_KEY", "")
# What a step does, for tensor subclasses that read it in ``fsdp_pre_all_gather``.
TrainingState = _find("torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState")


def register_as_sharded(module: nn.Module, state: object) -> None:
    """Make ``state_of(module)`` return ``state``, and torch's ``replicate`` skip ``module``."""
    if _registry is not None:
        module.__dict__.setdefault(_registry, {})["fully_shard"] = None
    if _STATES:
        module.__dict__.setdefault(_STATES, {})[inspect.unwrap(_fully_shard)] = state


# --- meshes and placements -----------------------------------------------------------------


# Given a list of parts of one mesh, returns the mesh with the axes and process groups of all parts.
# A public DeviceMesh over the same ranks would make new process groups.
concatenate_meshes: Callable[[list[DeviceMesh]], DeviceMesh] = _or_error(
    "torch.distributed.device_mesh.DeviceMesh._concatenate"
)
# Returns a 1D mesh over all ranks of a mesh. torch makes it, with its process group, only once.
flatten_mesh: Callable[[DeviceMesh], DeviceMesh] = _or_error(
    "torch.distributed.device_mesh.DeviceMesh._flatten"
)
# ``strided_shard(dim, split_factor=n)``: shards a dim that axes further right cut into n parts.
# torch's own fully_shard uses it for parameters, and torch's checkpoints know it.
strided_shard: Callable[..., Placement] = _or_error(
    "torch.distributed.tensor.placement_types._StridedShard"
)


# --- process groups ------------------------------------------------------------------------


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that runs the collectives of ``group`` on ``device``."""
    return group._get_backend(device)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of ``backend_of(group, device)``; empty if there is no such backend."""
    try:
        return str(backend_of(group, device).name())
    except RuntimeError:
        return ""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long the collectives of ``group`` on ``device`` wait for a rank."""
    options = None
    with contextlib.suppress(RuntimeError):  # a process group written in Python has no backend
        options = getattr(backend_of(group, device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout


def connect_by_gloo(group: dist.ProcessGroup, place: str, timeout: timedelta) -> Any:
    """Return connections among the ranks of ``group``, which find each other in its store.

    Unlike a group by ``dist.new_group``, they have no name, which would depend on the groups that
    this process has made and destroyed: after an error, ranks may differ in that. The ranks pass
    the same ``place`` instead, for each set of connections another one.
    """
    store = group.get_group_store()
    if store is None:
        raise RuntimeError(f"group {group.group_name!r} has no store; unset MESHARD_DEBUG.")
    prefixed = dist.PrefixStore(place, store)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(prefixed, group.rank(), group.size(), timeout)


def all_gather_by_gloo(
    connections: Any, outputs: list[torch.Tensor], source: torch.Tensor, timeout: timedelta
) -> None:
    """Gather in host memory. Raises a RuntimeError after ``timeout``, or if a rank has ended."""
    options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.timeout = timeout
    connections.allgather([outputs], [source], options).wait()


# --- names that differ between the supported versions --------------------------------------

# torch 2.13 renamed the collectives on one tensor; the old names warn there.
if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor

_METHODS_ARE_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")


def start_all_gather_on(
    group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor
) -> dist.Work:
    """Start an all-gather without the argument checks of torch's public function."""
    if _METHODS_ARE_RENAMED:
        return group.all_gather_single(output, source)
    return group._allgather_base(output, source)


def start_all_to_all_on(
    group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, sizes: list[int]
) -> dist.Work:
    """Start an all-to-all without torch's checks. ``sizes`` is empty if all are equal."""
    if _METHODS_ARE_RENAMED:
        return group.all_to_all_single(output, source, sizes, sizes)
    return group.alltoall_base(output, source, sizes, sizes)


# --- checkpoints ---------------------------------------------------------------------------


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that ``str`` shows as ``torch.<name>``.

    Raises:
        ValueError: This torch has no such dtype.
    """
    dtype = _find(f"torch.{name}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}.")
    return dtype


def torch_version() -> str:
    """Return the version of torch, which checkpoints record."""
    return str(torch.__version__)


def constant_of(name: str) -> Any:
    """Return the dtype, layout or memory format that is called ``torch.<name>``; else None."""
    value = _find(f"torch.{name}")
    return value if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else None


def dcp_storage_info(file: str, begin: int, size: int) -> Any:
    """Return a torch checkpoint's record of where an item lies: its file, and the bytes in it."""
    return _or_error("torch.distributed.checkpoint.filesystem._StorageInfo")(file, begin, size)
