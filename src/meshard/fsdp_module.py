"""What can I call on a sharded module? FSDP2's surface, as one table of delegations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from meshard._runtime.param_group import Residence
from meshard._runtime.unit import DivideFactor, Unit, check_divide_factor, unit_of, units_in
from meshard.policies import GradientSync
from meshard.reduce_hooks import AllReduceHook

_CLASSES: dict[type, type] = {}


class UnshardHandle:
    """An ``unshard`` that may still be on its way.

    Args:
        unit: The unit that is being gathered; None if there is nothing to wait for.
    """

    def __init__(self, unit: Unit | None) -> None:
        self._unit = weakref.ref(unit) if unit is not None else None

    def wait(self) -> None:
        """Return once the whole parameters may be used on the current stream."""
        unit = self._unit() if self._unit is not None else None
        if unit is not None and unit.group is not None:
            _finish_unshard(unit)
        self._unit = None


def _finish_unshard(unit: Unit) -> None:
    assert unit.group is not None
    unit.group.finish_unshard()
    unit.group.show_unsharded()


class FSDPModule(TorchFSDPModule):
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
            _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
        module.__class__ = _CLASSES[original]
        # Not setattr: Module.__setattr__ is slow, and the unit is no submodule.
        module.__dict__["_meshard_unit"] = unit

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or cast the sharded parameters, whole copies dropped first."""
        for unit in units_in(_module(self)):
            if unit.group is not None:
                unit.group.reshard()
        # Past torch's FSDPModule, whose _apply looks for torch's own state.
        result = super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for unit in units_in(_module(self)):
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
        unit = _unit(self)
        if unit.group is None:
            return UnshardHandle(None) if async_op else None
        unit.group.forget_stale(leftover=True)
        unit.group.start_unshard()
        if async_op:
            return UnshardHandle(unit)
        _finish_unshard(unit)
        return None

    def reshard(self) -> None:
        """Give the whole parameters of this unit back. Every rank by itself."""
        group = _unit(self).group
        if group is not None and group.residence is not Residence.SHARDED:
            group.reshard()

    def reset_iter_state(self) -> None:
        """Forget a step that was interrupted: nothing whole, nothing on its way."""
        _unit(self).lifecycle.abort()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Not built yet: say so, instead of failing deep inside torch."""
        raise NotImplementedError(
            "copy.deepcopy of a sharded module is not built yet; build a second module, shard it, "
            "and load the state_dict of the first."
        )

    # --- gradients -------------------------------------------------------------------------

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
        for unit in _units(self, recurse):
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
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in _units(self, recurse):
            chosen = unit.settings.sync_when_on if requires_gradient_sync else GradientSync.NONE
            unit.settings.sync = chosen

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce across replicas (``FULL``), or inside the shard group only (``REDUCE_SCATTER``).

        While gradient sync is off this is remembered, and holds once it is on again.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        chosen = GradientSync.FULL if requires_all_reduce else GradientSync.REDUCE_SCATTER
        for unit in _units(self, recurse):
            unit.settings.sync_when_on = chosen
            if unit.settings.sync is not GradientSync.NONE:
                unit.settings.sync = chosen

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the step follows the next backward.

        After a backward that is not the last, reductions may still be on their way when it
        returns, to overlap with the next microbatch. Holds for the whole root.
        """
        _check_bool("is_last_backward", is_last_backward)
        _unit(self).lifecycle.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: DivideFactor, *, recurse: bool = True) -> None:
        """Divide gradients by ``factor`` in all, instead of by the number of ranks.

        Args:
            factor: A positive number; or a callable or a 0-d tensor that gives one each time
                gradients are reduced, as for a count of tokens over all ranks. It must be the
                same on every rank, and for all microbatches of a window.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``factor`` is none of these.
            ValueError: ``factor`` is not positive and finite.
            RuntimeError: A window is open: part of it was divided by the old factor.
        """
        if callable(factor) and not isinstance(factor, torch.Tensor):
            chosen: DivideFactor = factor
        elif isinstance(factor, torch.Tensor) and factor.dim() == 0:
            chosen = factor
        else:
            chosen = check_divide_factor(factor)
        units = list(_units(self, recurse))
        for unit in units:
            if unit.gradients is not None and unit.gradients.is_pending:
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
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in _units(self, recurse):
            unit.settings.zero_unused = reduce_scatter_unused_params

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept FSDP2's setting: meshard always sums and divides by itself."""
        _check_bool("enable", enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Have ``hook(shard)`` change the reduced gradients of this unit in place.

        Called once per window with what is about to be added to ``.grad``, after the reduction
        over replicas. A second call replaces the hook. ``meshard.register_reduce_hook`` chains
        several.

        Args:
            hook: Gets the flat shard ``[shard_numel]``.
            stream: Run the hook on it; the current stream waits. None: the current stream.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {hook!r}.")
        hooks = _unit(self).settings.reduce_hooks
        hooks[:] = [other for other in hooks if not isinstance(other, AllReduceHook)]
        hooks.append(AllReduceHook(hook, stream))

    # --- when to gather --------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Give whole parameters back after forward, or keep them for backward."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.settings.keep_in = None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Give whole parameters back after backward, or keep them for the next forward."""
        _check_bool("reshard_after_backward", reshard_after_backward)
        for unit in _units(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather this unit in backward, or not because its backward does not read parameters."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        _unit(self).settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(  # type: ignore[override]
        self, modules: list[FSDPModule]
    ) -> None:
        """Gather these modules when this one starts its forward, instead of the predicted one."""
        _unit(self).settings.forward_prefetch = _refs("forward", modules)

    def set_modules_to_backward_prefetch(  # type: ignore[override]
        self, modules: list[FSDPModule]
    ) -> None:
        """Gather these modules when this one starts its backward, instead of the predicted one."""
        _unit(self).settings.backward_prefetch = _refs("backward", modules)


def _module(module: Any) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
    return units_in(_module(module)) if recurse else iter([_unit(module)])


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}.")


def _refs(direction: str, modules: list[FSDPModule]) -> list[weakref.ref[Unit]]:
    refs = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(
                f"modules to {direction} prefetch must be sharded by fully_shard, "
                f"got {type(module).__name__}."
            )
        refs.append(weakref.ref(unit))
    return refs


def _not_built(name: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is part of FSDP2's surface that is not built yet.")

    method.__name__ = name
    method.__doc__ = "Not built yet."
    return method


# What FSDP2 has and this class has not yet; torch's own methods would look for torch's state.
for _name in (
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
):
    setattr(FSDPModule, _name, _not_built(_name))
