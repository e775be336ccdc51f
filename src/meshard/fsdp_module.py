"""Methods of sharded modules.

``module(...)`` does, by hooks. Here are the two ways to have others go through the same hooks:
``module.forward(...)`` always, and whatever ``register_fsdp_forward_method`` names.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

from meshard._comm.custom import GroupMemory
from meshard._comm.divergence import share
from meshard._engine.deepcopy import copy_with_units
from meshard._engine.hooks import run_in_unit
from meshard._engine.unit import (
    CommSettings,
    DivideFactor,
    ReduceHook,
    Unit,
    check_divide_factor,
    unit_of,
    units_in,
    units_of,
)
from meshard._mesh.mesh_info import separate_reduce_scatter_pg
from meshard._torch.private import skip_dynamo_once
from meshard.policies import AllGather, GradientSync, ReduceScatter
from meshard.reduce_hooks import OnStream


def as_module(module: Any) -> nn.Module:
    """Return what a mixin calls ``self``: it is always mixed into a module."""
    assert isinstance(module, nn.Module)
    return module


def own_unit(module: Any) -> Unit:
    """Return the unit that was made for ``module``, the outer one if there are several."""
    unit = unit_of(module)
    assert unit is not None
    return unit


def own_units(module: Any) -> list[Unit]:
    """Return the units that were made for ``module``: one for each mesh of its parameters."""
    return units_of(as_module(module))


def reached_units(module: Any, recurse: bool) -> Iterator[Unit]:
    """Iterate over the units of ``module``, and with ``recurse`` over those inside."""
    return units_in(as_module(module)) if recurse else iter(own_units(module))


def check_bool(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}.")


_REGISTERED = "_meshard_forward_methods"  # on a module: names, with what its class does not have


def direct_forward(original: type[nn.Module]) -> Callable[..., Any] | None:
    """Return a ``forward`` for the sharded kind of ``original`` that may be called directly.

    Inside ``module(...)`` the parameters are whole already, and it only passes the call on.
    None where ``original`` has no ordinary method of that name.
    """
    plain = original.forward
    if plain is nn.Module.forward or not inspect.isfunction(plain):
        return None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = self._meshard_unit
        if unit.group is None or unit.group.is_unsharded_installed:
            return original.forward(self, *args, **kwargs)
        method = functools.partial(original.forward, self)
        return run_in_unit(self, unit, method, args, kwargs)

    # Dynamo keeps what it compiles, and counts it, per code object: each class needs its own.
    forward.__code__ = forward.__code__.replace()
    return functools.wraps(plain)(forward)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have ``module.method_name(...)`` see whole parameters, as ``module(...)`` does.

    The method goes through the same steps as a forward: gather, casts of inputs and outputs, a
    gather again in backward, and everything given back if it raises. It may call ``module(...)``,
    and be called by it. Registering twice, or on a module that is not sharded, does nothing.

    **Collective:** a call of the method, as a call of the module.

    Args:
        module: A module that ``fully_shard`` was applied to; others are left alone.
        method_name: Name of one of its methods.

    Raises:
        ValueError: ``module`` has no such method.

    >>> import torch, meshard
    >>> class Tokens(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = torch.nn.Embedding(4, 2)
    ...     def forward(self, ids):
    ...         return self.table(ids)
    ...     def scores(self, hidden):
    ...         return hidden @ self.table.weight.t()
    >>> tokens = meshard.fully_shard(Tokens())
    >>> meshard.register_fsdp_forward_method(tokens, "scores")
    >>> tokens.scores(torch.ones(1, 2)).shape
    torch.Size([1, 4])
    """
    if not callable(getattr(module, method_name, None)):
        raise ValueError(
            f"cannot register {method_name!r} as a forward method: this {type(module).__name__} "
            "has no method of that name."
        )
    registered = module.__dict__.setdefault(_REGISTERED, {})
    if unit_of(module) is None or method_name == "forward" or method_name in registered:
        return
    # On the class, which only sharded modules have: nothing on the instance refers to itself, so
    # deleting it frees it, and a copy of it calls its own method.
    if not hasattr(vars(type(module)).get(method_name), _REGISTERED):
        setattr(type(module), method_name, _dispatching(type(module), method_name))
    # Somebody may have put another method on this instance.
    registered[method_name] = module.__dict__.pop(method_name, None)


def _dispatching(sharded_class: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return a method that is hooked on the instances that asked for it."""
    original = inspect.getattr_static(sharded_class, name, None)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        registered = self.__dict__.get(_REGISTERED, {})
        called = registered.get(name)
        if called is None and original is not None:
            called = original.__get__(self, type(self))
        if called is None:
            raise AttributeError(f"this {type(self).__name__} has no attribute {name!r}.")
        unit = unit_of(self) if name in registered else None
        return run_in_unit(self, unit, called, args, kwargs) if unit else called(*args, **kwargs)

    if original is not None:
        functools.update_wrapper(method, getattr(sharded_class, name))
    setattr(method, _REGISTERED, True)
    # Dynamo would write the call down as `self.name(...)`, which is this method again.
    return skip_dynamo_once(method)


class GradientSetters:
    """The part of ``FSDPModule`` that is about gradients."""

    def set_gradient_sync(self, mode: GradientSync, *, recurse: bool = True) -> None:
        """Choose how far the gradients of the following backwards are reduced.

        Args:
            mode: NONE, REDUCE_SCATTER or FULL.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``mode`` is not a ``GradientSync``.
        """
        if not isinstance(mode, GradientSync):
            raise TypeError(f"mode must be a meshard.GradientSync, got {mode!r}.")
        for unit in reached_units(self, recurse):
            unit.settings.sync = mode
            if mode is not GradientSync.NONE:
                unit.settings.sync_when_on = mode

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients at all, or not (``GradientSync.NONE``).

        Turned on again, gradients are reduced as far as before: after
        ``set_requires_all_reduce(False)`` that is ``REDUCE_SCATTER``.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in reached_units(self, recurse):
            chosen = unit.settings.sync_when_on if requires_gradient_sync else GradientSync.NONE
            unit.settings.sync = chosen

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce across replicas (``FULL``), or inside the shard group only (``REDUCE_SCATTER``).

        While gradient sync is off this is remembered, and holds once it is on again.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        chosen = GradientSync.FULL if requires_all_reduce else GradientSync.REDUCE_SCATTER
        for unit in reached_units(self, recurse):
            unit.settings.sync_when_on = chosen
            if unit.settings.sync is not GradientSync.NONE:
                unit.settings.sync = chosen

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the step follows the next backward.

        After a backward that is not the last, reductions may still be on their way when it
        returns, to overlap with the next microbatch. Holds for the whole root.
        """
        check_bool("is_last_backward", is_last_backward)
        own_unit(self).lifecycle.is_last_backward = is_last_backward

    def set_gradient_divide_factor(
        self, factor: DivideFactor | None, *, recurse: bool = True
    ) -> None:
        """Divide gradients by ``factor`` in all, instead of by the ranks of their parameter's mesh.

        Args:
            factor: A positive number; or a callable or a 0-d tensor that gives one (or a 0-d
                tensor) when gradients are reduced, as for a count of tokens over all ranks: read
                once per backward, which waits for a tensor on a device. It must be the same on
                every rank, and for all microbatches of a window. None: the number of ranks.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``factor`` is none of these.
            ValueError: ``factor`` is not positive and finite.
            RuntimeError: A window is open: part of it was divided by the old factor. A callable or
                a tensor whose value changes within a window raises in backward.
        """
        chosen = factor
        if isinstance(factor, torch.Tensor):
            if factor.dim():
                check_divide_factor(factor)
        elif factor is not None and not callable(factor):
            chosen = check_divide_factor(factor)
        units = list(reached_units(self, recurse))
        for unit in units:
            if unit.gradients is not None and unit.gradients.is_window_open:
                raise RuntimeError(
                    f"unit {unit.label!r} is in the middle of a window, whose gradients must all "
                    "be divided by the same factor; set it before the first microbatch."
                )
        for unit in units:
            unit.settings.divide_factor = chosen

    def set_reduce_scatter_divide_factor(self, factor: DivideFactor) -> None:
        """Do what ``set_gradient_divide_factor`` does; FSDP2's older name for it."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give parameters that no rank used a gradient of zero instead of None.

        What is communicated is the same: unused parameters always have their place in it.
        """
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in reached_units(self, recurse):
            unit.settings.zero_unused = reduce_scatter_unused_params

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept FSDP2's setting: meshard always sums and divides by itself."""
        check_bool("enable", enable)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.Stream | None = None,
        recurse: bool = True,
    ) -> None:
        """Have ``hook(shard)`` change reduced gradients in place.

        Called for each unit once per window with what is about to be added to ``.grad``, after the
        reduction over replicas. A second call replaces the hook; ``meshard.register_reduce_hook``
        chains several.

        Args:
            hook: Gets the flat shard ``[shard_numel]``. None: take the hook off.
            stream: Run the hook on it; the current stream waits. None: the current stream.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: There is a stream, but the mesh is on the CPU.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook must be callable or None, got {hook!r}.")
        for unit in reached_units(self, recurse):
            on_cpu = unit.group is not None and unit.group.spec.device.type == "cpu"
            if stream is not None and on_cpu:
                raise ValueError("a CPU mesh has no streams; leave stream out.")
            hooks = [other for other in unit.settings.reduce_hooks if not other.is_all_reduce]
            if hook is not None:
                after = hook if stream is None else OnStream(hook, stream)
                hooks.append(ReduceHook(after=after, is_all_reduce=True))
            unit.settings.reduce_hooks[:] = hooks


class GatherSetters:
    """The part of ``FSDPModule`` that is about gathering."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Give whole parameters back after forward, or keep them for backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        for unit in reached_units(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.settings.post_forward_group = None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Give whole parameters back after backward, or keep them for the next forward."""
        check_bool("reshard_after_backward", reshard_after_backward)
        for unit in reached_units(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Gather this unit in backward, or not because its backward does not read parameters.

        Args:
            unshard_in_backward: Gather it.
            recurse: Also the units inside. The only setter that does not by default: it is a
                promise about what one unit computes.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        for unit in reached_units(self, recurse):
            unit.settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these modules when this one starts its forward, instead of the predicted one."""
        for unit in own_units(self):
            unit.settings.forward_prefetch = _refs("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these modules when this one starts its backward, instead of the predicted one."""
        for unit in own_units(self):
            unit.settings.backward_prefetch = _refs("backward", modules)


def _refs(direction: str, modules: list[TorchFSDPModule]) -> list[weakref.ref[Unit]]:
    refs: list[weakref.ref[Unit]] = []
    for module in modules:
        units = units_of(module) if isinstance(module, nn.Module) else []
        if not units:
            raise ValueError(
                f"modules to {direction} prefetch must be sharded by fully_shard, "
                f"got {type(module).__name__}."
            )
        refs.extend(weakref.ref(unit) for unit in units)
    return refs


class CommSetters:
    """The part of ``FSDPModule`` that is about communication. Call these between steps."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce gradients on a process group of their own, so that gathers need not queue.

        A backend may run one collective of a group after the other (NCCL does); with a second
        group of the same ranks, a reduce-scatter and an all-gather travel at the same time.

        **Collective:** all ranks of the shard group, the first time for a mesh. Destroyed with the
        other groups by ``destroy_process_group()``.

        Args:
            enable: Use the second group; False goes back to the group that gathers.
            recurse: Also for the units inside.
        """
        check_bool("enable", enable)
        for unit in _units_at_rest(self, recurse):
            if unit.group is not None:
                mesh_info = unit.group.spec.mesh_info
                unit.settings.scatter_group = (
                    separate_reduce_scatter_pg(mesh_info) if enable else None
                )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Bound how many units may have whole gradients on their way at once.

        Each takes the bytes of its unit's whole gradients. With 1, a unit waits for the unit before
        it to be reduced; more hide slow reductions. The default is 3; 2 are in use unless replicas
        are reduced over as well.

        Args:
            max_input_buffers: At least 1; the one that is being filled counts.
            recurse: Also for the units inside.

        Raises:
            TypeError: It is not an int.
            ValueError: It is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}.")
        for unit in reached_units(self, recurse):
            unit.settings.max_input_buffers = max_input_buffers

    def set_custom_all_gather(self, comm: AllGather, *, recurse: bool = True) -> None:
        """Gather this unit with ``comm`` instead of the backend's all-gather.

        Not used by groups of one rank. ``meshard.CommLedger`` and ``MESHARD_DEBUG`` see it.

        Args:
            comm: See ``meshard.AllGather``; one written for FSDP2 fits.
            recurse: Also for the units inside. (FSDP2 does not, and does nothing on a root whose
                children own all parameters.)

        Raises:
            TypeError: ``comm`` cannot be called, or has no ``allocate``.
            ValueError: Memory of the process group was asked for.
        """
        _replace(self, recurse, all_gather=_checked("set_custom_all_gather", comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter, *, recurse: bool = True) -> None:
        """Reduce the gradients of this unit with ``comm`` instead of the backend's reduce-scatter.

        It is given SUM; meshard divides before and after.

        Args:
            comm: See ``meshard.ReduceScatter``; one written for FSDP2 fits.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``comm`` cannot be called, or has no ``allocate``.
            ValueError: Memory of the process group was asked for.
        """
        _replace(self, recurse, reduce_scatter=_checked("set_custom_reduce_scatter", comm))

    def set_allocate_memory_from_process_group_for_comm(
        self, enable: bool, *, recurse: bool = True
    ) -> None:
        """Take the buffers of this unit's collectives from the process group's own allocator.

        What an all-gather yields and what a reduce-scatter is given and yields. NCCL may then send
        without copying.

        Args:
            enable: Do so.
            recurse: Also for the units inside.

        Raises:
            RuntimeError: The backend has no memory to give (gloo has none).
            ValueError: A custom collective was set, which allocates by itself.
        """
        check_bool("enable", enable)
        for unit in reached_units(self, recurse):
            if enable and unit.group is not None:
                GroupMemory(unit.group.spec.device).of(unit.group.spec.mesh_info.shard_group)
        _replace(self, recurse, from_group=enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Not built: meshard does not gather through symmetric memory yet."""
        raise NotImplementedError(
            "gathering through symmetric memory is not built; use set_custom_all_gather, or "
            "set_allocate_memory_from_process_group_for_comm."
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next gather wait for ``event`` instead of all that is queued when it starts.

        For an optimizer that steps on a stream of its own. Used once: record and set a new one
        after each step. **Stream:** the event must come after the optimizer's step, and that after
        the backward. On a CPU mesh the host has waited already.

        Args:
            event: Recorded after the step.

        Raises:
            TypeError: It is not an event.
        """
        if not hasattr(event, "wait") or not hasattr(event, "record"):
            raise TypeError(f"event must be a torch.Event, got {event!r}.")
        own_unit(self).lifecycle.comm.gather_after(event)


def share_comm_ctx(modules: list[Any]) -> None:
    """Have several roots communicate on the same streams, as the stages of a pipeline do.

    Without it every root has streams of its own, and memory that one has freed cannot serve
    another. Call it after the last ``fully_shard``, between steps.

    Args:
        modules: Modules that ``fully_shard`` was applied to.

    Raises:
        ValueError: One of them is not sharded, or they are on different devices.

    >>> import torch, meshard
    >>> stages = [meshard.fully_shard(torch.nn.Linear(2, 2)) for _ in range(2)]
    >>> meshard.share_comm_ctx(stages)
    """
    units = [own_unit(module) for module in modules if _check_sharded(module)]
    devices = {unit.group.spec.device.type for unit in units if unit.group is not None}
    if len(devices) > 1:
        raise ValueError(f"modules that share streams must be on one device, got {devices}.")
    for unit in units[1:]:
        unit.lifecycle.use(share(units[0].lifecycle.comm, unit.lifecycle.comm))


def _check_sharded(module: Any) -> bool:
    if not isinstance(module, CommSetters):
        raise ValueError(
            f"share_comm_ctx needs modules sharded by fully_shard, got {type(module).__name__}."
        )
    return True


def _units_at_rest(module: Any, recurse: bool) -> list[Unit]:
    units = list(reached_units(module, recurse))
    for unit in units:
        unit.lifecycle.finish_reductions()
    return units


def _checked(setter: str, comm: Any) -> Any:
    if not callable(comm) or not hasattr(comm, "allocate"):
        raise TypeError(f"{setter} needs an object with allocate() and __call__(), got {comm!r}.")
    return comm


def _replace(module: Any, recurse: bool, **changes: Any) -> None:
    units = list(reached_units(module, recurse))
    settings = [_changed(unit, changes) for unit in units]  # all are checked before one is changed
    for unit, chosen in zip(units, settings, strict=True):
        _put(unit, chosen)


def _changed(unit: Unit, changes: dict[str, Any]) -> CommSettings:
    chosen: CommSettings = replace(unit.settings.comm, **changes)
    if chosen.from_group and (chosen.all_gather or chosen.reduce_scatter):
        raise ValueError(
            "memory of the process group and a custom collective exclude each other, because a "
            "custom collective allocates by itself; set only one of them."
        )
    return chosen


def _put(unit: Unit, chosen: CommSettings) -> None:
    unit.lifecycle.finish_reductions()
    unit.settings.comm = chosen
    if unit.group is not None:
        unit.group.comm = chosen.apply_to(unit.lifecycle.comm, unit.group.spec.device)


_CLASSES: dict[type, type] = {}


class UnshardHandle:
    """An ``unshard`` that may still be on its way.

    Args:
        units: The units that are being gathered.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self._manual_unshards = [
            (weakref.ref(unit.group), unit.group.start_manual_unshard())
            for unit in units
            if unit.group is not None
        ]

    def wait(self) -> None:
        """Return once the whole parameters may be used on the current stream.

        Does nothing if a forward has used them meanwhile, or they were given back.
        """
        for ref, manual_unshard in self._manual_unshards:
            group = ref()
            if group is not None:
                group.finish_manual_unshard(manual_unshard)
        self._manual_unshards.clear()


class FSDPModule(GradientSetters, GatherSetters, CommSetters, TorchFSDPModule):
    """What ``fully_shard`` adds to the class of a module.

    A sharded module is an instance of this, of ``torch.distributed.fsdp.FSDPModule`` and of its
    own class. Setters with ``recurse=True`` also reach the units inside, and may be called at any
    time between steps.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 4))
    >>> isinstance(layer, torch.nn.Linear) and isinstance(layer, meshard.FSDPModule)
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class: a slice of a sharded Sequential is not one."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        return original(*args, **kwargs)

    @staticmethod
    def adopt(module: nn.Module, unit: Unit) -> None:
        """Make ``module`` an instance of FSDPModule, with ``unit`` behind it."""
        original = type(module)
        if original not in _CLASSES:
            forward = direct_forward(original)
            members = {} if forward is None else {"forward": forward}
            _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), members)
        module.__class__ = _CLASSES[original]
        # Not setattr: Module.__setattr__ is slow, and the unit is no submodule.
        module.__dict__["_meshard_unit"] = unit

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or cast the sharded parameters, whole copies dropped first."""
        for unit in units_in(as_module(self)):
            if unit.group is not None:
                unit.group.check_not_summoned("moved or cast")
                unit.group.end_manual_unshard()
                unit.group.reshard()

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            applied: torch.Tensor = fn(tensor)
            # A shard is a part of a flat buffer: in channels_last, say, it would lie about that.
            return applied.contiguous() if isinstance(applied, DTensor) else applied

        # Past torch's FSDPModule, whose _apply looks for torch's own state.
        result = super(TorchFSDPModule, self)._apply(apply, recurse)  # type: ignore[misc]
        for unit in units_in(as_module(self)):
            if unit.group is not None:
                unit.group.adopt_edits()
        return result

    # --- gather and let go, by hand --------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather the whole parameters of this unit now.

        **Collective:** the shard group. **Lifetime:** until ``reshard``, or the end of the
        unit's next forward if that reshards.

        Args:
            async_op: Return a handle at once, to wait for later.
        """
        units = [unit for unit in own_units(self) if unit.group is not None]
        for unit in units:
            assert unit.group is not None
            unit.group.check_not_summoned("gathered by unshard()")
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give the whole parameters of this unit back. Every rank by itself."""
        for unit in own_units(self):
            if unit.group is None:
                continue
            unit.group.reshard_by_hand(awaits_backward=unit.step.awaits_gradients)

    def reset_iter_state(self) -> None:
        """Forget a step that was interrupted: nothing whole, nothing on its way."""
        own_unit(self).lifecycle.abort()

    # --- copies ----------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another sharded module, with units of its own on the same mesh."""
        return copy_with_units(as_module(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say what to do instead of pickling: hooks and process groups cannot be pickled."""
        raise TypeError(
            f"a sharded {type(self).__name__.removeprefix('FSDP')} cannot be pickled, nor copied "
            "by copy.copy; save its state_dict() (with torch.distributed.checkpoint, or whole by "
            "get_model_state_dict with full_state_dict=True), or use copy.deepcopy."
        )
