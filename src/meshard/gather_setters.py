"""When is a sharded module gathered, and when are whole parameters given back?"""

from __future__ import annotations

import weakref

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshard._runtime.unit import Unit, units_of
from meshard.setters import check_bool, own_units, reached_units


class GatherSetters:
    """The part of ``FSDPModule`` that is about gathering."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Give whole parameters back after forward, or keep them for backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        for unit in reached_units(self, recurse):
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.settings.keep_in = None

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

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules when this one starts its forward, instead of the predicted one."""
        for unit in own_units(self):
            unit.settings.forward_prefetch = _refs("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules when this one starts its backward, instead of the predicted one."""
        for unit in own_units(self):
            unit.settings.backward_prefetch = _refs("backward", modules)


def _refs(direction: str, modules: list[FSDPModule]) -> list[weakref.ref[Unit]]:
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
