"""The most memory of this process, where shared memory counts once.

The kernel's peak of the resident set counts what a process reads of its neighbours' memory, on both
sides. Here every rank counts its private memory, and its part of what the ranks share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from meshard._shared_memory.ring import Ring


def resident(what: str) -> int:
    """Return a figure of the kernel on this process, in bytes: ``VmRSS`` now, ``VmHWM`` at most."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{what}:\s+(\d+)", status)
    assert found is not None, what
    return int(found.group(1)) * 1024


class Meter:
    """Peaks between the moments at which segments change; the largest is kept in ``peak``.

    From one moment to the next, the peak of the resident set is the kernel's, less the mapped
    memory that came since the beginning (which is that of segments), plus this rank's part of the
    segments. Of what is mapped at both ends of the time between, the less is taken off: so
    the figure is rather too large.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._before = self._mapped = self._read_mapped()
        self._own: dict[int, int] = {}  # bytes by segment
        self._begin()

    @staticmethod
    def _read_mapped() -> int:
        return resident("RssFile") + resident("RssShmem")

    @staticmethod
    def _begin() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew

    def look(self, ring: Ring | None = None) -> None:
        """Note that the segment of ``ring`` is about to change, or has."""
        mapped = self._read_mapped()
        if ring is not None:
            descriptor, count = ring._segment.descriptor, len(ring._ranks)
            self._own[descriptor] = os.fstat(descriptor).st_blocks * 512 // count
        beside = min(mapped, self._mapped) - self._before
        self.peak = max(self.peak, resident("VmHWM") - beside + sum(self._own.values()))
        self._mapped = mapped
        self._begin()

    def begin_anew(self) -> None:
        self.look()
        self.peak = 0


@contextmanager
def metered() -> Iterator[Meter]:
    meter = Meter()

    def watched(method: Any) -> Any:
        def call(self: Ring, *args: Any, **kwargs: Any) -> Any:
            meter.look(self)
            try:
                return method(self, *args, **kwargs)
            finally:
                meter.look(self)

        return call

    methods = {name: watched(getattr(Ring, name)) for name in ("take", "publish", "release")}
    with mock.patch.multiple(Ring, **methods):
        yield meter
