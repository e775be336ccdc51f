"""What can I call on a sharded module? What acts at once is here, what is set in the mixins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

from meshard._runtime.handed_out import hand_out, show_handed_out, take_back
from meshard._runtime.open_events import joining_hook_maker
from meshard._runtime.param_group import Residence
from meshard._runtime.unit import Unit, units_in
from meshard._runtime.unit_copy import copy_with_units
from meshard.comm_setters import CommSetters
from meshard.forward_methods import direct_forward
from meshard.gather_setters import GatherSetters
from meshard.gradient_setters import GradientSetters
from meshard.setters import as_module, own_unit, own_units

_CLASSES: dict[type, type] = {}


class UnshardHandle:
    """An ``unshard`` that may still be on its way.

    Args:
        units: The units that are being gathered.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self._handed_out = [
            (weakref.ref(unit.group), hand_out(unit.group, joining_hook_maker(unit)))
            for unit in units
            if unit.group is not None
        ]

    def wait(self) -> None:
        """Return once the whole parameters may be used on the current stream.

        Does nothing if a forward has used them meanwhile, or they were given back.
        """
        for ref, handed_out in self._handed_out:
            group = ref()
            if group is not None:
                show_handed_out(group, handed_out)
        self._handed_out.clear()


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
                unit.group.check_closed("moved or cast")
                take_back(unit.group, stays=False)
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
            unit.group.check_closed("gathered by unshard()")
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
            take_back(unit.group, stays=False)
            if unit.group.residence is not Residence.SHARDED:
                unit.group.reshard()
            unit.group.finish_copies()  # whoever reshards by hand may edit the shards next

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
