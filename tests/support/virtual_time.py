"""A machine whose kernels and network take exactly as long as they are said to, in no real time.

The code that runs is the real one. Its clock stands still, but for what a kernel or a wait adds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from meshard import tracing
from meshard._comm.spans import HostClock
from meshard.planning import measuring
from meshard.planning.phantom import KernelMode
from meshard.planning.tape import work_of
from tests.benchmarks import pretend_network
from tests.benchmarks.pretend_network import Network, pretend_group


class VirtualTime:
    """Seconds since the machine was switched on."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


class _Future:
    """Calls back at the moment at which the collective ends, which is known in advance."""

    def __init__(self, clock: VirtualTime, ready: float) -> None:
        self._clock, self._ready = clock, ready

    def add_done_callback(self, callback: Any) -> None:
        now, self._clock.now = self._clock.now, self._ready
        callback(self)
        self._clock.now = now


@contextmanager
def virtual_machine(ranks: int, network: Network, seconds_per_byte: float) -> Iterator[VirtualTime]:
    """Be rank 0 of ``ranks``. A kernel takes ``seconds_per_byte`` for its work."""
    clock = VirtualTime()

    def take_time(*kernel: Any) -> None:
        clock.now += seconds_per_byte * work_of(*kernel)

    future = mock.patch.object(
        pretend_network._LateWork, "get_future", lambda work: _Future(clock, work._ready)
    )
    stands_in = SimpleNamespace(monotonic=clock.read, sleep=clock.sleep)
    with (
        pretend_group(ranks, network),
        mock.patch.object(pretend_network, "time", stands_in),
        mock.patch.object(pretend_network, "_SMALL", 0),  # copies that a real network does not make
        mock.patch.object(time, "monotonic", clock.read),
        mock.patch.object(HostClock, "now", staticmethod(clock.read)),
        mock.patch.object(measuring, "all_ranks", return_value=None),
        mock.patch.object(tracing, "all_ranks", return_value=None),
        future,
        KernelMode(take_time),
    ):
        yield clock
