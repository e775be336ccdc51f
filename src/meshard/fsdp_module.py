"""Methods of sharded modules, and the setters that replicated modules share with them."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import deprecated

from meshard._comm.communicator import CommSettings, can_allocate
from meshard._engine.deepcopy import copy_with_units
from meshard._engine.hooks import run_in_units
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.param_group import Lease, ParamGroup
from meshard._engine.unit import Unit, alive, own_class, require_units, unit_of
from meshard._gradients.accumulator import DivideFactor, ReduceHook, check_divide_factor
from meshard._mesh.mesh_info import separate_reduce_scatter_pg
from meshard._torch.dtensor import gradient_dtype
from meshard._torch.private import (
    is_of_to_empty,
    skip_dynamo_once,
    state_of,
    too_new,
)
from meshard.initialization import poisoned
from meshard.policies import (
    AllGather,
    GradientSync,
    ReduceScatter,
    check_bool,
)
from meshard.reduce_hooks import on_stream

# --- helpers of the setters ----------------------------------------------------------------------


def _groups(module: Any, recurse: bool) -> list[ParamGroup]:
    return [unit.group for unit in require_units(module, recurse=recurse) if unit.params]


def _lifecycle(module: Any) -> Lifecycle:
    return require_units(module, recurse=False)[0].lifecycle


def _lifecycle_of_root(module: Any, caller: str) -> Lifecycle:
    unit = require_units(module, recurse=False)[0]
    if not unit.is_root:
        raise RuntimeError(
            f"{caller} must be called on the root, and unit {unit.label!r} is inside another one."
        )
    return unit.lifecycle


def _write(module: Any, recurse: bool, **settings: Any) -> None:
    """Write ``settings`` of each selected unit."""
    for unit in require_units(module, recurse=recurse):
        for name, value in settings.items():
            setattr(unit.settings, name, value)


# --- registered forward methods ------------------------------------------------------------------

# The name of a dict that is an attribute of modules. A key is the name of a method registered by
# ``register_fsdp_forward_method``. The value is the method that the user had set on the module
# itself; None: the module had none of its own.
FORWARD_METHODS = "_meshard_forward_methods"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Unshard the parameters of ``module`` while ``module.method_name(...)`` runs.

    The method goes through the same steps as ``module(...)``, casts and backward included, with
    the same collectives. It may call ``module(...)``, and be called by it. Modules that are not
    sharded are left alone.

    Raises:
        ValueError: ``module`` has no such method.

    >>> import torch, meshard
    >>> class Scaled(torch.nn.Linear):
    ...     def scores(self, hidden):
    ...         return hidden @ self.weight.t()
    >>> layer = meshard.fully_shard(Scaled(2, 4))
    >>> meshard.register_fsdp_forward_method(layer, "scores")
    >>> layer.scores(torch.ones(1, 2)).shape
    torch.Size([1, 4])
    """
    method = getattr(module, method_name, None)
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(
            f"cannot register {method_name!r} as a forward method: this {type(module).__name__} "
            "has no method of that name."
        )
    if unit_of(module) is None or method_name == "forward":
        return
    registered = module.__dict__.setdefault(FORWARD_METHODS, {})
    if method_name in registered:
        return
    # The method is set on the class, which only sharded modules have. On the instance it would make
    # a cycle, which only the garbage collector frees, and a copy would call the method of the
    # original.
    if not hasattr(vars(type(module)).get(method_name), FORWARD_METHODS):
        setattr(type(module), method_name, _dispatching(type(module), method_name))
    registered[method_name] = module.__dict__.pop(method_name, None)


def _dispatching(sharded_class: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return a method that unshards the unit of its instance, if that has registered ``name``."""
    original = inspect.getattr_static(sharded_class, name, None)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        registered = self.__dict__.get(FORWARD_METHODS, {})
        called = registered.get(name)
        if called is None and original is None:
            # The class may find the method elsewhere, as a wrapper does in the module it wraps.
            called = type(self).__getattr__(self, name)
        if called is None:
            bind = getattr(original, "__get__", None)  # a callable object may have none
            called = original if bind is None else bind(self, type(self))
        if name not in registered:
            return called(*args, **kwargs)
        return run_in_units(self, called, args, kwargs)

    if original is not None:
        functools.update_wrapper(method, getattr(sharded_class, name))
    setattr(method, FORWARD_METHODS, True)
    # Skipped, because Dynamo would trace the call as `self.name(...)`, which is this method again.
    return skip_dynamo_once(method)


# --- methods of sharded and of replicated modules ------------------------------------------------

if TYPE_CHECKING:

    class _AnyModule(nn.Module, Any):  # type: ignore[misc]  # Any as a base, on purpose
        """A module of an unknown class: Python has no type for "this class and that one"."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _AnyModule = object


class GradientSetters(_AnyModule):
    """What sharded and replicated modules have in common: gradients, copies, interrupted steps.

    With ``recurse`` a setter also reaches the units inside.
    """

    def set_gradient_sync(self, mode: GradientSync, *, recurse: bool = True) -> None:
        """Choose how far the gradients of the following backwards are reduced."""
        _write(self, recurse, sync=mode)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Turn gradient reduction on (``GradientSync.FULL``) or off (``GradientSync.NONE``)."""
        mode = GradientSync.FULL if requires_gradient_sync else GradientSync.NONE
        self.set_gradient_sync(mode, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce across replicas (``FULL``), or inside the shard group only (``REDUCE_SCATTER``).

        Does nothing to units that do not reduce at all (``GradientSync.NONE``).
        """
        mode = GradientSync.FULL if requires_all_reduce else GradientSync.REDUCE_SCATTER
        for unit in require_units(self, recurse=recurse):
            if unit.settings.sync.reduces:
                unit.settings.sync = mode

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Declare whether the optimizer steps after the next backward of the root.

        A backward that is not the last waits only for reductions that bring gradients into
        ``.grad``. Those of other modes may overlap with the next microbatch.
        """
        _lifecycle(self).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose what ends a window: ``finalize_backward``, or the last backward. Root only.

        While enabled, every backward reduces as one that is not the last, whatever
        ``set_is_last_backward`` says. Units that have not run keep their pending gradients
        until ``finalize_backward``.

        Raises:
            RuntimeError: This is not the root, or a backward is under way or not finalized yet.
        """
        _lifecycle_of_root(self, "set_manual_backward_finalization").set_manual(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what is pending, and end the window. Root only.

        Needs ``set_manual_backward_finalization(True)``. In units whose ``GradientSync`` is FULL
        now, pending gradients are reduced into ``.grad``, and ``overlap_optimizer`` steps. Units
        under NONE and REDUCE_SCATTER stay as their backwards have left them. Units are resharded,
        unless ``set_reshard_after_backward(False)``. Before the first backward this does nothing.

        **Collective:** every rank of the meshes, and so is ``wait`` of the handle.

        Args:
            async_op: Start the reductions and return a handle. Until its ``wait`` the gradients may
                not be used, and a forward, a backward and another ``finalize_backward`` raise.

        Raises:
            RuntimeError: This is not the root; finalization is not manual; a forward or backward is
                under way; or a handle is not waited for.

        >>> import torch, meshard
        >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
        >>> layer.set_manual_backward_finalization(True)
        >>> for _ in range(3):
        ...     layer(torch.ones(1, 2)).sum().backward()
        >>> handle = layer.finalize_backward(async_op=True)
        >>> handle.wait()
        >>> layer.bias.grad.full_tensor()
        tensor([3., 3.])
        """
        handle = GradientReductionHandle(_lifecycle_of_root(self, "finalize_backward"))
        if async_op:
            return handle
        handle.wait()
        return None

    def set_gradient_divide_factor(
        self, factor: DivideFactor | None, *, recurse: bool = True
    ) -> None:
        """Divide gradients by ``factor`` in all, instead of by the number of ranks of their mesh.

        ``factor`` is a positive number, or a callable or 0-d tensor that gives one and is read once
        per backward. It must be the same on every rank, and for all microbatches of a window. None:
        the number of ranks.

        Raises:
            ValueError: ``factor`` is not positive and finite as a normal number of float32.
            RuntimeError: A window is open, part of which was divided by the old factor.
        """
        is_read_later = callable(factor) or (isinstance(factor, torch.Tensor) and not factor.dim())
        chosen = factor if factor is None or is_read_later else check_divide_factor(factor)
        for unit in require_units(self, recurse=recurse):
            unit.lifecycle.abort_if_failed()
            if unit.gradients.window.is_open:
                raise RuntimeError(
                    f"unit {unit.label!r} is in the middle of a window, whose gradients must all "
                    "be divided by the same factor; set it before the first microbatch."
                )
        _write(self, recurse, divide_factor=chosen)

    @deprecated("call set_gradient_divide_factor, as in FSDP2")
    def set_reduce_scatter_divide_factor(self, factor: DivideFactor) -> None:
        """Call ``set_gradient_divide_factor``, of which this is FSDP2's deprecated name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose the gradient of parameters that no rank used: zero if True, None if False."""
        _write(self, recurse, zero_unused=reduce_scatter_unused_params)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept FSDP2's setting, without effect: meshard always sums and divides by itself."""

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.Stream | None = None,
        recurse: bool = True,
    ) -> None:
        """Call ``hook(shard)`` on what is about to be added to ``.grad``, to change it in place.

        ``hook`` gets the flat shard ``[shard_numel]`` of the gradients of a unit, after they are
        reduced over replicas: once per reduction that ends in ``.grad`` (the last of a window). It
        runs on ``stream`` (None: the current one), and the current stream waits for it. A second
        call replaces the hook, None removes it; ``meshard.register_reduce_hook`` chains several.
        """
        after = hook if hook is None or stream is None else on_stream(hook, stream)
        new = [] if after is None else [ReduceHook(after=after, is_all_reduce=True)]
        for unit in require_units(self, recurse=recurse):
            hooks = unit.settings.reduce_hooks
            hooks[:] = [other for other in hooks if not other.is_all_reduce] + new

    def set_custom_all_reduce(
        self, comm: Callable[..., dist.Work | None] | None, *, recurse: bool = True
    ) -> None:
        """Sum gradients over replicas by ``comm`` instead of the backend's all-reduce.

        ``comm`` has the arguments of ``torch.distributed.all_reduce``; that function itself,
        or None, undoes an earlier call. The operation is always SUM: meshard divides by itself.
        ``comm`` may round what it sends: it gets gradients only. Groups of one rank do not call it.

        **Collective:** only if ``set_is_last_backward(False)`` left reductions in flight.

        >>> import torch, meshard
        >>> layer = meshard.replicate(torch.nn.Linear(1, 1))
        >>> layer.set_custom_all_reduce(torch.distributed.all_reduce)
        """
        _replace_comm(self, recurse, "all_reduce", comm)

    def reset_iter_state(self) -> None:
        """Drop a step that was interrupted: reshard all units, close all windows."""
        _lifecycle(self).abort()

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return a module like this one, with units of its own on the same mesh."""
        return copy_with_units(self, memo)

    def __copy__(self: Any) -> Any:
        """Raise a TypeError: two modules would share the units."""
        name = own_class(self).__name__
        raise TypeError(f"a sharded or replicated {name} needs copy.deepcopy, not copy.copy.")

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Raise a TypeError: a pickle would have no units."""
        name = own_class(self).__name__
        raise TypeError(f"a sharded or replicated {name} cannot be pickled; save its state_dict().")


class FSDPModule(GradientSetters, TorchFSDPModule):
    """What ``fully_shard`` adds to the class of a module.

    A sharded module is an instance of this, of ``torch.distributed.fsdp.FSDPModule`` and of its
    own class. Its setters may be called at any time between steps. To a type checker this class
    stands for both: it may be used as the module's own class, whose attributes have type ``Any``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 4))
    >>> isinstance(layer, torch.nn.Linear) and isinstance(layer, meshard.FSDPModule)
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the original class: a slice of a sharded Sequential is plain."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        return original(*args, **kwargs)

    # --- gather and reshard ----------------------------------------------------------------

    # torch's own handle is another class, with the same wait().
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather the parameters of this unit; with ``async_op``, ``wait()`` installs them.

        **Collective:** the shard group. **Lifetime:** until ``reshard``, or the end of the
        unit's next forward if that reshards.
        """
        units = require_units(self, recurse=False)
        for unit in units:
            unit.group.check_not_summoned("gathered by unshard()")
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this unit. Not a collective."""
        for unit in require_units(self, recurse=False):
            is_open = unit.lifecycle.recorder.is_open(unit.number)
            unit.group.end_unshard(voids_graphs=not is_open)
            unit.group.release(Lease.ALL)
            unit.group.finish_copies()  # the user may edit the shards next

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free unsharded parameters after forward, or retain them for backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        _write(self, recurse, post_forward_group=None, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free unsharded parameters after backward, or retain them for the next forward."""
        check_bool("reshard_after_backward", reshard_after_backward)
        _write(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of unsharded parameters when they are resharded.

        Their ``data_ptr()`` is then the same after each gather, as CUDA graphs need it; also for
        parameters with ``fsdp_pre_all_gather``. Between two gathers the memory has old values.
        Casts, moves and ``meshard.offload`` free it. False frees it at the next ``reshard``, or at
        once if the unit is resharded.

        >>> import torch, meshard
        >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
        >>> layer.set_keep_unsharded_storage(True)
        >>> layer.unshard()
        >>> address = layer.weight.data_ptr()
        >>> layer.reshard()
        >>> layer.unshard()
        >>> layer.weight.data_ptr() == address
        True
        """
        for group in _groups(self, recurse):
            group.keep_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Choose whether backward gathers this unit; False if its backward reads no parameters."""
        _write(self, recurse, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these modules when this one begins its forward, instead of the predicted one.

        Modules under another root than this one are left out.
        """
        _write(self, recurse=False, forward_prefetch=_refs(modules))

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these modules when this one begins its backward, instead of the predicted one.

        Modules under another root than this one are left out.
        """
        _write(self, recurse=False, backward_prefetch=_refs(modules))

    # --- communication, set between steps ----------------------------------------------------

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce on a second process group, so that gathers need not queue behind reductions.

        **Collective:** all ranks of the shard group, the first time for a mesh.
        """
        for unit in require_units(self, recurse=recurse):
            unit.lifecycle.finish_reductions()
            if unit.params and (mesh_info := unit.group.spec.mesh_info).shard_axis is not None:
                unit.settings.scatter_group = (
                    separate_reduce_scatter_pg(mesh_info) if enable else None
                )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Bound how many units may have unsharded gradients in flight at once.

        The unit whose reduction begins counts: with 1, it waits until the one before is reduced; on
        a device, until what that one has sent is reduced over the shards. The default is 1 on a
        device, as in FSDP2. On CPU it is 3, of which ranks use 2 unless they reduce over replicas.
        """
        if not max_input_buffers >= 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}.")
        _write(self, recurse, max_input_buffers=max_input_buffers)

    def set_custom_all_gather(self, comm: AllGather | None, *, recurse: bool = True) -> None:
        """Gather this unit with ``comm`` instead of the backend's all-gather.

        ``comm`` is a ``meshard.policies.AllGather``; one written for FSDP2 fits. Groups of one rank
        do not use it. None undoes an earlier call.
        """
        _replace_comm(self, recurse, "all_gather", comm)

    def set_custom_reduce_scatter(
        self, comm: ReduceScatter | None, *, recurse: bool = True
    ) -> None:
        """Reduce the gradients of this unit with ``comm`` instead of the backend's reduce-scatter.

        ``comm`` is a ``meshard.policies.ReduceScatter``; one written for FSDP2 fits. Its operation
        is always SUM. None undoes an earlier call.
        """
        _replace_comm(self, recurse, "reduce_scatter", comm)

    def set_allocate_memory_from_process_group_for_comm(
        self, enable: bool, *, recurse: bool = True
    ) -> None:
        """Allocate the buffers of this unit's collectives by the process group's own allocator.

        NCCL may then send without copying. Where the backend has no allocator (gloo) this does
        nothing. Custom collectives allocate by themselves.
        """
        for unit in require_units(self, recurse=recurse):
            from_group = enable and _can_allocate(unit)
            _use_comm(unit, replace(unit.settings.comm, from_group=from_group))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next gather wait for ``event`` only, not for all work of the current stream.

        For an optimizer that steps on a stream of its own: set a new event after each step.
        """
        _lifecycle(self).comm.gather_after(event)

    def _get_fsdp_state(self) -> Any:
        """Return the ``StageState``, which torch's pipeline schedules call and trainers read."""
        return state_of(self)

    # --- moves, casts and copies ---------------------------------------------------------------

    @torch.inference_mode(False)  # inference tensors have no version
    @torch.no_grad()
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or cast the sharded parameters; unsharded ones are freed first."""
        groups = _groups(self, recurse=True)
        for group in groups:
            group.check_not_summoned("moved or cast")
            group.finish_pending_step()
            group.release(Lease.ALL)
            group.reshard()
            # Freed even if set_keep_unsharded_storage(True) was called.
            group.unit_params.free_unsharded()

        @functools.wraps(fn)  # units inside recognise to_empty() by the name of its function
        def apply(tensor: torch.Tensor) -> torch.Tensor:
            applied: torch.Tensor = fn(tensor)
            if isinstance(applied, DTensor):
                return applied.contiguous()  # a part of a flat buffer is in no other format
            return poisoned(applied) if is_of_to_empty(fn) else applied

        shards = [param.sharded for group in groups for param in group.params]
        chosen = [(p, p.grad_dtype, p.grad) for p in shards if gradient_dtype(p) is not p.dtype]
        # torch replaces a DTensor by a new one, which lacks the user's grad_dtype. Then torch may
        # refuse a .grad of another dtype than the parameter's. So .grad is taken away here, and
        # both are set again below.
        for param, *_ in chosen:
            param.grad = None
        # Not torch's FSDPModule._apply, which reads torch's own state.
        result = super(TorchFSDPModule, self)._apply(apply, recurse)
        for param, dtype, grad in chosen:
            param.grad_dtype = dtype
            param.grad = None if grad is None else apply(grad).to(dtype)
        for group in groups:
            group.adopt_edits()
        return result


def refuse_new_methods(ours: type, torchs: type) -> None:
    """Make each public method that a newer torch has added raise a NotImplementedError."""
    for name, method in inspect.getmembers(torchs, inspect.isfunction):
        if not name.startswith("_") and getattr(ours, name) is method:
            setattr(ours, name, _not_built(name, method))


def _not_built(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(*_: Any, **__: Any) -> Any:
        raise too_new(name)

    return refuse


refuse_new_methods(FSDPModule, TorchFSDPModule)


class UnshardHandle:
    """An ``unshard(async_op=True)`` in flight."""

    def __init__(self, units: list[Unit]) -> None:
        self._started = [weakref.ref(unit.group) for unit in units if unit.params]
        for unit in units:
            unit.lifecycle.abort_if_cut_off()
            if unit.params:
                unit.group.start_for_user()

    def wait(self) -> None:
        """Wait until the unsharded parameters may be used on the current stream.

        Does nothing if a forward has used them meanwhile, or they were resharded.
        """
        for group in alive(self._started):
            group.finish_for_user()
        self._started.clear()


class GradientReductionHandle:
    """A ``finalize_backward(async_op=True)`` in flight."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = weakref.ref(lifecycle)
        self._started = lifecycle.start_finalization()  # None: there is nothing to wait for

    def wait(self) -> None:
        """Finish the reductions; a second call does nothing. **Collective:** every rank.

        Raises:
            RuntimeError: ``reset_iter_state`` was called or a step failed; the gradients are lost.
        """
        lifecycle = self._lifecycle()
        if lifecycle is not None and self._started is not None:
            lifecycle.finish_finalization(self._started)
        self._started = None


def _refs(modules: list[Any]) -> list[weakref.ref[Unit]]:
    return [weakref.ref(unit) for each in modules for unit in require_units(each, recurse=False)]


def _replace_comm(module: Any, recurse: bool, name: str, comm: Any) -> None:
    """Change a custom collective of the selected units."""
    for unit in require_units(module, recurse=recurse):
        _use_comm(unit, replace(unit.settings.comm, **{name: comm}))


def _use_comm(unit: Unit, settings: CommSettings) -> None:
    unit.lifecycle.finish_reductions()
    unit.settings.comm = settings
    unit.group.unit_params.comm = unit.lifecycle.comm.with_custom(settings)


def _can_allocate(unit: Unit) -> bool:
    """Whether the backend can allocate memory for the collectives of a unit with shards."""
    spec = unit.group.spec if unit.params else None
    if spec is None or spec.mesh_info.shard_axis is None:
        return False
    return can_allocate(spec.mesh_info.shard_group, spec.device)


def share_comm_ctx(modules: list[Any]) -> None:
    """Let several roots communicate on the same streams, as the stages of a pipeline do.

    Memory that one has freed can then serve another. They must be on one device. Call it after the
    last ``fully_shard``, between steps.

    Raises:
        ValueError: A module is no unit.

    >>> import torch, meshard
    >>> stages = [meshard.fully_shard(torch.nn.Linear(2, 2)) for _ in range(2)]
    >>> meshard.share_comm_ctx(stages)
    """
    first, *others = map(_lifecycle, modules)
    for lifecycle in others:
        lifecycle.use(first.comm.shared_with(lifecycle.comm))
