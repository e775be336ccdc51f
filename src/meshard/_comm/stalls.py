"""Warnings about collectives that take too long: which one, for how long, which ranks are missing.

A rank that runs one batch more than the others waits for them until its process group gives up:
after 10 (NCCL) or 30 minutes (gloo) by default. Each process has one list of what was started and
is not known to be done: waits of the host, and collectives that were queued on a device. One thread
looks at the list. It never synchronises.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from meshard._comm.divergence import REMEDY
from meshard._torch.private import current_frames
from meshard._torch.user_line import user_frame

_VARIABLE = "MESHARD_STALL_SECONDS"
_DEFAULT_SECONDS = 30.0
_MOST = 1024  # how many handles the list has at most
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
    The watching thread does the rest.
    """

    __slots__ = ("_group", "_missing", "_thread", "_what", "began", "is_reported")

    def __init__(
        self,
        what: Collective | str,
        group: dist.ProcessGroup | None = None,
        missing: Callable[[], list[int]] | None = None,
    ) -> None:
        """``missing`` returns the ranks that have not arrived. Pass None if that is unknown."""
        self._what, self._group, self._missing = what, group, missing
        self.is_reported = False

    def __enter__(self) -> None:
        self.began, self._thread = time.monotonic(), threading.get_ident()
        _watch(self)

    def __exit__(self, *_: object) -> None:
        _handles.pop(id(self), None)

    def done(self) -> bool:
        return False  # when the wait ends, it leaves the list

    def text(self, seconds: float) -> str:
        """Return what to report if the wait has lasted ``seconds``."""
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
        return f"has waited {seconds:.3g} s for the {what}{where}: {who}"


class _Queued:
    """A collective that was queued on a device, and the event that follows it."""

    def __init__(
        self, event: Any, collective: Collective, *, owner: object, device_module: Any
    ) -> None:
        self.began, self.is_reported = time.monotonic(), False
        self._event, self._collective, self._owner = event, collective, weakref.ref(owner)
        self._on_device: Callable[[], Any] = contextlib.nullcontext
        if hasattr(device_module, "current_device"):
            self._on_device = functools.partial(
                device_module.device, device_module.current_device()
            )

    def done(self) -> bool:
        if self._owner() is None:
            return True
        # The watching thread starts on device 0. A query there would create a CUDA context, which
        # takes memory on a device that may belong to another rank.
        with self._on_device():
            return bool(self._event.query())

    def text(self, seconds: float) -> str:
        """Return what to report ``seconds`` after the collective was queued."""
        return (
            f"waits for the {spoken(self._collective)}, which its device has not finished "
            f"{seconds:.3g} s after it was queued: other ranks have not come, or the device still "
            "computes what comes before it"
        )


def watch_event(event: Any, collective: Collective, *, owner: object, device_module: Any) -> None:
    """Watch a collective on the current device, whose end is ``event``, while ``owner`` is alive.

    During a graph capture, an event query by any thread would invalidate the capture. So if this
    thread captures, all handles are dropped, and the watching thread has no event to query.
    """
    if getattr(device_module, "is_current_stream_capturing", bool)():
        _handles.clear()  # their events are over: a capture begins by waiting for the device
    else:
        _watch(_Queued(event, collective, owner=owner, device_module=device_module))


# Handles by id(), in the order in which they began.
_handles: OrderedDict[int, Waiting | _Queued] = OrderedDict()
_thread: threading.Thread | None = None
_moved_at = 0.0  # when a handle was last seen to be done


def _watch(handle: Waiting | _Queued) -> None:
    _handles[id(handle)] = handle
    if len(_handles) > _MOST:
        _handles.popitem(last=False)
    if _thread is None:
        _start_to_look()


def _start_to_look() -> None:
    global _thread
    _thread = threading.Thread(target=_look_for_ever, name="meshard stalls", daemon=True)
    _thread.start()


def _forget_thread() -> None:
    global _thread
    _thread = None
    _handles.clear()


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
    """Report the oldest handle that is not done and was not reported.

    It must have begun ``seconds`` ago. No other may have been found done for as long, because a
    device may be far behind the host. Younger handles are not asked: their events may be those of
    the warm-up of a graph capture that has begun, in which no collective was queued yet.
    """
    global _moved_at
    for handle in list(_handles.values()):
        if now - handle.began < seconds:
            return
        # The wait, or its process group, may end meanwhile.
        with contextlib.suppress(Exception):
            if handle.done():
                _handles.pop(id(handle), None)
                _moved_at = now
            elif not handle.is_reported:
                if now - _moved_at >= seconds:
                    # What is queued on a device behind the first collective waits for it too.
                    of_device = isinstance(handle, _Queued)
                    for each in list(_handles.values()) if of_device else (handle,):
                        each.is_reported = True
                    _report(handle.text(now - handle.began))
                return


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
