"""Warnings about collectives that take too long: which one, for how long, which ranks are missing.

A rank that runs one batch more than the others waits for them until its process group gives up:
after 10 (NCCL) or 30 minutes (gloo) by default. In each process one thread looks at the waits of
all threads, and queries the events that follow collectives on a device. It never synchronises.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from meshard._comm.divergence import REMEDY
from meshard._torch.private import current_frames
from meshard._torch.user_line import user_frame

_VARIABLE = "MESHARD_STALL_SECONDS"
_DEFAULT_SECONDS = 30.0
_IS_CAPTURING = "is_current_stream_capturing"  # torch.cuda has it, not every device module
_EVENTS = 1024  # how many collectives a ``WatchedStream`` remembers at most
_logger = logging.getLogger("meshard")

# An operation, and the name of the unit that it serves. If it serves no unit, the second string is
# its purpose, in parentheses: "(norm)".
Collective = tuple[str, str]


def spoken(collective: Collective) -> str:
    """Return a collective in words."""
    op, label = collective
    is_of_unit = not label.startswith("(") or label.startswith("(root)")
    return f"{op} of unit {label!r}" if is_of_unit else f"{op} {label}"


def stall_seconds() -> float:
    """Return the number of seconds after which a wait is reported; 0: never."""
    return _parsed(os.environ.get(_VARIABLE, ""))


@functools.cache
def _parsed(text: str) -> float:
    try:
        return max(0.0, float(text)) if text else _DEFAULT_SECONDS
    except ValueError:
        raise ValueError(f"{_VARIABLE} must be a number of seconds, got {text!r}.") from None


class Waiting:
    """A context in which a thread waits for other ranks.

    On CPU a step enters such a context at every wait, so ``__enter__`` does as little as possible.
    The watching thread does the rest, in ``look``.
    """

    __slots__ = ("_group", "_is_reported", "_missing", "_thread", "_what", "began")

    def __init__(
        self,
        what: Collective | str,
        group: dist.ProcessGroup | None = None,
        missing: Callable[[], list[int]] | None = None,
    ) -> None:
        """``missing`` returns the ranks that have not arrived. Pass None if that is unknown."""
        self._what, self._group, self._missing = what, group, missing
        self._is_reported = False

    def __enter__(self) -> None:
        self.began, self._thread = time.monotonic(), threading.get_ident()
        _waits[id(self)] = self
        if _thread is None:
            _start_to_look()

    def __exit__(self, *_: object) -> None:
        del _waits[id(self)]

    def look(self, now: float, seconds: float) -> None:
        """Report the wait, once, if it has lasted ``seconds``."""
        if self._is_reported or now - self.began < seconds:
            return
        self._is_reported = True
        what = self._what if isinstance(self._what, str) else spoken(self._what)
        if self._missing is not None:
            who = f"{_have(self._missing())} not come"
        elif self._group is not None:
            ranks = dist.get_process_group_ranks(self._group)
            who = f"not all of ranks {', '.join(map(str, ranks))} have come"
        else:
            who = "not all ranks have come"
        frame = user_frame(current_frames().get(self._thread))
        where = f", in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        _report(f"has waited {now - self.began:.3g} s for the {what}{where}: {who}")


class WatchedStream:
    """The collectives that were queued on a device, each with the event that follows it."""

    def __init__(self, device_module: Any) -> None:
        self._events: deque[tuple[Any, float, Collective]] = deque(maxlen=_EVENTS)
        self._module = device_module
        self._device: int | None = None
        self._moved_at = 0.0  # when an event was last seen to be over
        self._reported: Any = None
        _streams.append(weakref.ref(self))
        if _thread is None:
            _start_to_look()

    def add(self, event: Any, collective: Collective) -> None:
        """Remember a collective, whose end is ``event``; forget some that are over.

        During a graph capture, an event query by any thread would invalidate the capture. So if
        this thread captures, it forgets all events, and the watching thread has none to query.
        """
        events, is_capturing = self._events, getattr(self._module, _IS_CAPTURING, None)
        if is_capturing is not None and is_capturing():
            events.clear()  # they are over: a capture begins by waiting for the device
            return
        if self._device is None and hasattr(self._module, "current_device"):
            self._device = self._module.current_device()
        now = time.monotonic()
        self._forget_if_over(now, most=2)  # up to two for each one added, so few remain
        events.append((event, now, collective))

    def _forget_if_over(self, now: float, most: int, queued_by: float = float("inf")) -> None:
        """Forget collectives that are over and were queued no later than ``queued_by``.

        Forget up to ``most``, and stop at the first that is not over or was queued later.
        """
        events = self._events
        with contextlib.suppress(IndexError):  # none is left; the other thread forgets them too
            for _ in range(most):
                event, queued_at, _ = events[0]
                if queued_at > queued_by or not event.query():
                    return
                events.popleft()
                self._moved_at = now

    def look(self, now: float, seconds: float) -> None:
        """Report the first collective that is not over, once.

        It must have been queued ``seconds`` ago, and no other may have ended for as long.
        """
        events = self._events
        with self._on_device():
            # A query during a graph capture would invalidate the capture. The first ``add`` inside
            # a capture drops all events. Before that, events of the warm-up may still be here. So
            # events younger than ``seconds`` are not queried, which is enough if the capture
            # follows its warm-up at once.
            self._forget_if_over(now, most=_EVENTS, queued_by=now - seconds)
        if not events or now - max(events[0][1], self._moved_at) < seconds:
            return
        event, queued_at, collective = events[0]
        if self._reported is not event:
            self._reported = event
            _report(
                f"waits for the {spoken(collective)}, which its device has not finished "
                f"{now - queued_at:.3g} s after it was queued: other ranks have not come, or the "
                "device still computes what comes before it"
            )

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        # The watching thread starts on device 0. A query there would create a CUDA context, which
        # takes memory on a device that may belong to another rank.
        if self._device is None:
            return contextlib.nullcontext()
        guard: contextlib.AbstractContextManager[Any] = self._module.device(self._device)
        return guard


_waits: dict[int, Waiting] = {}  # the waits under way, by id()
_streams: list[weakref.ref[WatchedStream]] = []
_thread: threading.Thread | None = None


def _start_to_look() -> None:
    global _thread
    _thread = threading.Thread(target=_look_for_ever, name="meshard stalls", daemon=True)
    _thread.start()


def _forget_thread() -> None:
    global _thread
    _thread = None
    _waits.clear()


os.register_at_fork(after_in_child=_forget_thread)  # a forked process has no such thread


def _look_for_ever() -> None:
    while True:
        try:
            seconds = stall_seconds()
        except ValueError:  # the user gets this error from ``exchange_numbers``
            seconds = 0.0
        time.sleep(min(1.0, seconds / 4) if seconds else 1.0)
        if seconds:
            _look(time.monotonic(), seconds)


def _look(now: float, seconds: float) -> None:
    _streams[:] = [ref for ref in _streams if ref() is not None]
    for each in (*_waits.values(), *(ref() for ref in _streams)):
        # The wait, or its process group, may end during ``look``.
        with contextlib.suppress(Exception):
            if each is not None:
                each.look(now, seconds)


def _have(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks))
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


def _report(text: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else -1
    _logger.warning(
        "rank %d %s.\n%s Saves and state dicts are to be called on all ranks too. MESHARD_DEBUG=1 "
        "names the rank and the unit where they part. If a rank only takes long, raise %s; 0 turns "
        "this off.",
        rank, text, REMEDY, _VARIABLE,
    )  # fmt: skip
