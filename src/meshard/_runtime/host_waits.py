"""When does the host wait for what moves between its memory and the device?

At the end of a backward, unless more of the same window are to come; at the end of an evaluation;
when reductions are finished by hand; and when an interrupted step is cleaned up. In between, shards
and gradients in host memory belong to the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from meshard._runtime.unit import Unit


class HostWaits:
    """The units of a root whose shards live in host memory; usually none."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []

    def watch(self, units: Iterable[Unit]) -> None:
        """Wait for those of ``units`` that need it from now on."""
        self._units = [
            weakref.ref(unit)
            for unit in units
            if unit.group is not None and unit.group.tensors.link is not None
        ]

    def settle(self) -> None:
        """Wait until nothing moves, and have all gradients in ``.grad``. Blocks the host."""
        for ref in self._units:
            unit = ref()
            if unit is None or unit.gradients is None:
                continue
            if unit.group is None or unit.group.stepping is None:  # else an optimizer waits
                unit.gradients.settle()
