"""Private names of torch, one function for each use.

None is needed to import meshard. Where one is gone there is a slower way, or the first use raises
an AttributeError that names it. ``tests/torch/test_missing_names.py`` takes each away.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

Function = TypeVar("Function", bound=Callable[..., Any])


def _find(path: str) -> Any:
    """Return what a dotted name stands for; None if it is gone."""
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


# --- torch.compile -------------------------------------------------------------------------

_set_strategy = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy = _find("torch._C._dynamo.eval_frame._FrameExecStrategy")
_Action = _find("torch._C._dynamo.eval_frame._FrameAction")
_CAN_MARK_CODE = None not in (_set_strategy, _Strategy, _Action)


def skip_dynamo(function: Function) -> Function:
    """Make ``torch.compile`` run ``function``, and what it calls, uncompiled.

    Dynamo inspects every frame that Python is about to run, also those of hooks around a compiled
    module. The mark on the code makes it skip this frame and all below; the attribute ends a graph
    where a trace would call the function. Calls cost nothing, where the public
    ``torch.compiler.disable`` adds a wrapper of 0.9 us.

    Returns:
        ``function`` itself, if marks are to be had.
    """
    if not _CAN_MARK_CODE:
        disabled: Function = torch.compiler.disable(function)
        return disabled
    return _marked(function, _Strategy(_Action.SKIP, _Action.SKIP))


def skip_dynamo_once(function: Function) -> Function:
    """Make ``torch.compile`` run ``function`` uncompiled, but not what it calls."""
    if not _CAN_MARK_CODE:
        disabled: Function = torch.compiler.disable(function, recursive=False)
        return disabled
    return _marked(function, _Strategy(_Action.SKIP, _Action.DEFAULT))


def _marked(function: Function, strategy: Any) -> Function:
    _set_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "the border of a meshard unit"  # type: ignore[attr-defined]
    return function


# --- autograd ------------------------------------------------------------------------------


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the present backward ends; torch's own DDP does so too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def graph_task_id() -> int:
    """Return the number of the autograd run of this thread; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward that is running has ``retain_graph`` or ``create_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def next_node() -> int:
    """Return the number of the next autograd node of this thread; they count up."""
    return torch._C._autograd._get_sequence_nr()


def number_of(tensor: torch.Tensor) -> int:
    """Return the number of the autograd node that made ``tensor``; -1 if none did."""
    node = tensor.grad_fn
    return -1 if node is None else node._sequence_nr()


_OWN_KEYS = itertools.count(-1, -1)  # those of torch's handles count up from 0


def hook_gradient(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Do what ``tensor.register_hook(hook)`` does, without the handle, which takes 3 us to make.

    Args:
        tensor: One that requires a gradient.
        hook: Never removed.
    """
    if type(tensor) is not torch.Tensor:
        tensor.register_hook(hook)
        return
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node = tensor.grad_fn
        if node is not None:
            node._register_hook_dict(tensor)
    hooks[next(_OWN_KEYS)] = hook


Hooks = Mapping[int, Callable[..., Any]]

# The hooks of ``tensor.register_hook``; None or empty if there are none.
gradient_hooks_of: Callable[[torch.Tensor], Hooks | None] = attrgetter("_backward_hooks")
# Those of ``tensor.register_post_accumulate_grad_hook``, likewise.
accumulation_hooks_of: Callable[[torch.Tensor], Hooks | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


# --- tensors -------------------------------------------------------------------------------

# Grows with every edit of a tensor in place.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that ``tensor`` is a view of, to autograd; None if it is no view."""
    return tensor._base


def keeping_version(*tensors: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writing to ``tensors`` does not count as a change of them.

    Filling an unsharded parameter again is then no in-place change of a saved tensor.
    """
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensors)


# A context without the look-up of ``__torch_function__`` at each attribute of a DTensor, which
# takes twice as long as the attribute itself (DTensor's does nothing). For loops over many tensors
# that call no code of users.
without_torch_function: Callable[[], AbstractContextManager[None]] = (
    _find("torch._C.DisableTorchFunctionSubclass") or contextlib.nullcontext
)


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _multiply_each(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _concatenate_chunks(
    tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> torch.Tensor:
    assert dim == 0
    return torch.cat([each.reshape(num_chunks, -1) for each in tensors], dim=1, out=out)


# One kernel for a list of tensors: ``target.copy_(source)`` for each.
foreach_copy_: Callable[..., Any] = _find("torch._foreach_copy_") or _copy_each
# Likewise ``tensor.mul_(factor)``: a fifth of the time of one by one.
foreach_mul_: Callable[..., Any] = _find("torch._foreach_mul_") or _multiply_each
# ``[num_chunks, -1]`` of each tensor, all side by side. Sizes of dim 0 are multiples of num_chunks.
chunk_cat: Callable[..., Any] = _find("torch._chunk_cat") or _concatenate_chunks


def unscale_each(
    grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply plain tensors by ``inv_scale``, and set ``found_inf`` to 1 if one was not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def _never() -> bool:
    return False


is_profiling: Callable[[], bool] = _find("torch.autograd._profiler_enabled") or _never

# The code of a module's call around its forward, which has the module as ``self``.
module_call_code = (_find("torch.nn.Module._call_impl") or torch.nn.Module.__call__).__code__


# --- pytree --------------------------------------------------------------------------------


def _or_error(path: str) -> Callable[..., Any]:
    """Return what a dotted name stands for, or a function that raises an error that names it."""

    def is_gone(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"torch {torch.__version__} has no {path}, which meshard needs here.")

    return _find(path) or is_gone


# Nested containers that are registered with torch, and back.
tree_flatten = _or_error("torch.utils._pytree.tree_flatten")
tree_unflatten = _or_error("torch.utils._pytree.tree_unflatten")


# --- meshes and placements -----------------------------------------------------------------


def concatenate_meshes(parts: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the axes, and the process groups, of all ``parts`` of one mesh."""
    # A public DeviceMesh over the same ranks would make new process groups.
    return DeviceMesh._concatenate([*parts])


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with all axes of ``mesh`` as one, and a process group that it remembers."""
    return DeviceMesh._flatten(mesh)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return a shard of dim ``dim`` that was sharded ``split_factor`` times before.

    torch's own fully_shard puts it on parameters, and checkpoints know it.
    """
    placement_types = torch.distributed.tensor.placement_types
    return placement_types._StridedShard(dim, split_factor=split_factor)


# --- process groups ------------------------------------------------------------------------


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what carries the collectives of ``group`` on ``device``."""
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long the collectives of ``group`` on ``device`` wait for a rank."""
    options = None
    with contextlib.suppress(RuntimeError):  # a group in Python has no such backend
        options = getattr(backend_of(group, device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout
