"""Spans of time, for profilers and for ``meshard.trace``: what meshard does, and when.

While nothing records, ``profiled`` and ``issued`` cost a comparison or two. A recorder stores
*moments*: on a CPU they are seconds of ``time.monotonic``, on a device events on the current
stream. Events are read once the trace is over, so recording waits for no device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from meshard._torch.private import is_profiling

if TYPE_CHECKING:  # circular at run time
    from meshard._comm.communicator import CommEvent

Moment = Any  # seconds, or an event that was recorded on a stream; None: not known


class Clock(Protocol):
    """A source of moments for work on the host, or on the current stream of a device."""

    @property
    def is_beside_compute(self) -> bool:
        """Whether what is queued now runs beside forward and backward."""

    @property
    def memory_kind(self) -> str:
        """What ``bytes_alive`` counts; "" if it cannot count."""

    def now(self) -> Moment: ...

    def bytes_alive(self) -> int: ...

    def settle(self) -> Callable[[Moment], float]:
        """Wait for all work. Return a function from moments to seconds of ``time.monotonic``."""


class Issued(Protocol):
    """The record of one collective."""

    def ends_later(self) -> None:
        """Record the end when ``end`` is called, instead of when the issuing call returns."""

    def end(self) -> None: ...

    def waited(self, began: Moment, ended: Moment) -> None:
        """Record that compute has waited for the collective."""


class Recorder(Protocol):
    """A trace that records spans."""

    def span(
        self, what: str, label: str, clock: Clock, event: CommEvent | None
    ) -> contextlib.AbstractContextManager[object]: ...

    def issued(self) -> Issued | None: ...

    def enter(self, phase: str, label: str, clock: Clock) -> None:
        """Record that compute begins a phase of a unit, which lasts until the next call.

        Phases are ``"forward"``, ``"recompute"``, ``"backward"``, ``"optimizer"``, and "" for what
        is outside of units.
        """


recorder: Recorder | None = None  # set by ``start`` and ``stop`` only

_NOTHING = contextlib.nullcontext()


def start(new: Recorder) -> None:
    """Let ``new`` record from now on."""
    global recorder
    if recorder is not None:
        raise RuntimeError("a trace is active in this process already; leave it before the next.")
    recorder = new


def stop() -> None:
    """Record nothing from now on."""
    global recorder
    recorder = None


# --- hooks ------------------------------------------------------------------------------------


def ranged(what: str, label: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that torch.profiler, if it records, shows as ``meshard::what label``.

    ``label`` is the name of the unit.
    """
    # record_function takes microseconds even without a profiler, so it is called only with one.
    if not is_profiling():
        return _NOTHING
    return torch.profiler.record_function(f"meshard::{what} {label}")


def profiled(
    what: str, label: str, clock: Clock, event: CommEvent | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context that records its block like ``ranged``, and for a trace if one is active.

    ``event`` describes the collective that is issued inside the block, if any.
    """
    if recorder is None:
        return ranged(what, label)
    return _both(ranged(what, label), recorder.span(what, label, clock, event))


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


def issued() -> Issued | None:
    """Return the record of the collective that this thread is issuing; None if there is none."""
    return None if recorder is None else recorder.issued()


# --- clocks -----------------------------------------------------------------------------------


class HostClock:
    """The clock of work on the CPU. ``is_beside_compute``: the work has a thread of its own."""

    def __init__(self, *, is_beside_compute: bool = False) -> None:
        self.is_beside_compute = is_beside_compute
        self.memory_kind = "resident memory of the process" if os.path.exists(_STATM) else ""

    now = staticmethod(time.monotonic)

    def bytes_alive(self) -> int:
        return int(os.pread(_statm_of(os.getpid()), 64, 0).split()[1]) * _PAGE

    def settle(self) -> Callable[[Moment], float]:
        return float


@functools.cache
def _statm_of(process: int) -> int:
    """Return an open ``/proc/self/statm``, cached because opening it takes longer than reading.

    ``process`` is the id of this process. It is in the key of the cache, because after a fork the
    file must be opened again.
    """
    return os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)


_STATM, _PAGE = "/proc/self/statm", os.sysconf("SC_PAGE_SIZE")
HOST = HostClock()
WORKER = HostClock(is_beside_compute=True)


class StreamClock:
    """The clock of a device. ``comm_streams`` are the streams that run beside compute."""

    def __init__(self, device_module: Any, comm_streams: Mapping[Any, Any]) -> None:
        self._device_module = device_module
        self._comm_streams = comm_streams
        self._is_capturing = getattr(device_module, "is_current_stream_capturing", bool)
        has_stats = hasattr(device_module, "memory_stats_as_nested_dict")
        self.memory_kind = "memory of tensors on the device" if has_stats else ""

    @property
    def is_beside_compute(self) -> bool:
        return self._device_module.current_stream() in self._comm_streams.values()

    def now(self) -> Moment:
        """Return an event on the current stream; None during a capture, where it has no time."""
        if self._is_capturing():
            return None
        event = self._device_module.Event(enable_timing=True)
        return self._device_module.current_stream().record_event(event)

    def bytes_alive(self) -> int:
        # ``memory_allocated()`` returns the same number, but flattens and sorts all statistics.
        stats = self._device_module.memory_stats_as_nested_dict()
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def settle(self) -> Callable[[Moment], float]:
        last = self.now()
        self._device_module.synchronize()
        now = time.monotonic()
        return lambda moment: now - moment.elapsed_time(last) / 1000


@functools.cache
def clock_of(device: torch.device) -> Clock:
    """Return the clock of collectives that block compute on ``device``."""
    return HOST if device.type == "cpu" else StreamClock(torch.get_device_module(device), {})
