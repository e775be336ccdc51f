"""Messages between the ranks of one host.

Every rank has a segment that the others map. It writes what it has to say there, and then the
number of the message; whoever waits for that number reads where it lies, and then notes that it
has. All ranks of a group number their collectives alike, so that a number says which is meant, and
every word is written by one rank only: there are no locks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.blocking import exchange_numbers
from meshard._comm.communicator import Rows, StepPhase
from meshard._shared_memory.segment import IS_SUPPORTED, FirstFit, Segment, aligned
from meshard._torch.private import timeout_of

# Messages that may be on their way at once: a word for each of these is at the start of a segment.
_MESSAGES = 4096
_PUBLISHED, _PLACE, _SIZE, _ACKNOWLEDGED = range(4)
_TOKEN_WORD = 4 * _MESSAGES
_START = aligned(8 * (_TOKEN_WORD + 1))

_EAGER = 200  # looks before the thread goes to sleep: what is awaited is mostly there, or soon
_NAPS = (5e-5, 5e-4)  # seconds: at first, and when it takes long
_CALLS_PER_CHECK = 200
_STEPS_TO_REMEMBER = 4
_LARGE = 2**16  # bytes
_SHORT = 2e-3  # seconds: not for ever, for the neighbour may be waiting for this rank


class _Allocation:
    """A range of one's own segment."""

    __slots__ = ("begin", "message", "num_bytes", "watch")

    def __init__(self, begin: int, num_bytes: int) -> None:
        self.begin = begin
        self.num_bytes = num_bytes
        self.message = -1  # the last that was in it
        self.watch: weakref.ref[Any] | None = None


class _Process:
    """Another process, by a descriptor that stays its own when its number is used again."""

    def __init__(self, number: int) -> None:
        descriptor = os.pidfd_open(number)
        weakref.finalize(self, os.close, descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return bool(self._poll.poll(0))


class Channel:
    """The segments of all ranks of a group on one host.

    Args:
        segments: By rank.
        processes: Their process ids, by rank.
        rank: Which one is this rank's own.
        patience: Seconds after which a wait gives up.
    """

    def __init__(
        self, segments: list[Segment], processes: list[int], rank: int, patience: float
    ) -> None:
        self.rank = rank
        self.process = processes[rank]
        self.others = [other for other in range(len(segments)) if other != rank]
        self._segments = segments
        self._own = segments[rank]
        words = [segment.words(0, 4 * _MESSAGES) for segment in segments]
        self._published, self._position, self._size, self._acknowledged = (
            [each[kind * _MESSAGES : (kind + 1) * _MESSAGES] for each in words]
            for kind in (_PUBLISHED, _PLACE, _SIZE, _ACKNOWLEDGED)
        )
        self._patience = patience
        self._processes = {other: _Process(processes[other]) for other in self.others}
        self._next = 0
        self._trimmed_at = 0
        self._is_bare = False  # the last to trim wanted everything
        self._reach = 0  # how far the ranges of this part of a step go
        self._part: StepPhase | None = StepPhase.FORWARD
        self._reached: dict[StepPhase | None, deque[int]] = {
            part: deque(maxlen=_STEPS_TO_REMEMBER)
            for part in (StepPhase.FORWARD, StepPhase.BACKWARD)
        }
        self._free = FirstFit(_START)
        self._allocations: dict[int, _Allocation] = {}  # by address; the tensor lives
        # Appended to whenever a tensor dies, in the midst of anything: taken from in one place.
        self._freed: deque[_Allocation] = deque()
        self._unacknowledged: list[
            _Allocation
        ] = []  # the tensor is dead, the message not yet read by all

    # --- memory ----------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[numel]``, uninitialised, that can be passed on without a copy."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        self._reclaim()
        num_bytes = aligned(numel * dtype.itemsize)
        if num_bytes >= _LARGE and self._unacknowledged:
            self._wait_for_memory(num_bytes)
        begin = self._free.take(num_bytes)
        self._own.reserve(begin + num_bytes)
        self._reach = max(self._reach, begin + num_bytes)
        allocation = _Allocation(begin, num_bytes)
        allocations, freed = self._allocations, self._freed

        def drop(_: object) -> None:
            del allocations[address]
            freed.append(allocation)

        tensor, allocation.watch = self._own.allocate(begin, numel, dtype, drop)
        address = tensor.data_ptr()
        allocations[address] = allocation
        return tensor

    def allocate_rows(
        self, numel: int, dtype: torch.dtype, own: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return a row ``[numel]`` per rank, for ``publish_rows``; that of this rank is its own."""
        rows = list(self.allocate(len(self.others) * numel, dtype).view(len(self.others), numel))
        rows.insert(self.rank, torch.empty(numel, dtype=dtype) if own is None else own)
        return rows

    def _wait_for_memory(self, num_bytes: int) -> None:
        """Wait a little for what a neighbour is about to give back, rather than take more."""
        until = time.monotonic() + _SHORT
        while not self._free.fits(num_bytes) and self._unacknowledged and time.monotonic() < until:
            time.sleep(_NAPS[0])
            self._reclaim()

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """Give the memory of free ranges back; a part of a step begins.

        Args:
            keep_for: But for how far ranges went in the last steps: in backward, where the peak
                is, those of backwards, else all. None: all of it.
        """
        is_new = self._trimmed_at != self._next
        if is_new:
            self._trimmed_at = self._next
            self._reached[self._part].append(self._reach)
            self._reach = 0
        if keep_for in self._reached:
            self._part = keep_for
        elif not is_new and keep_for is StepPhase.STEP:
            return  # the units of a root ask one after another
        parts = (keep_for,) if keep_for is StepPhase.BACKWARD else self._reached
        known = [reach for part in parts for reach in self._reached[part]]
        if (self._is_bare and not is_new) or not known:
            return
        keep = 0 if keep_for is None else max(known)
        self._is_bare = keep_for is None
        self._reclaim()
        for begin, end in self._free.ranges:
            self._own.release_pages(max(begin, keep), end)

    def _reclaim(self) -> None:
        while self._freed:
            self._unacknowledged.append(self._freed.popleft())
        waiting = []
        for allocation in self._unacknowledged:
            if self._is_acknowledged(allocation.message):
                self._free.give(allocation.begin, allocation.num_bytes)
            else:
                waiting.append(allocation)
        self._unacknowledged = waiting

    def _is_acknowledged(self, message: int) -> bool:
        slot = message % _MESSAGES
        return message < 0 or all(
            self._acknowledged[other][slot] > message for other in self.others
        )

    # --- messages --------------------------------------------------------------------------

    def publish(self, tensor: torch.Tensor, *, copy: bool = False) -> int:
        """Pass ``tensor`` on to all others; return the number of the message.

        Memory from ``allocate`` is read where it is: it must not be written to again, and is not
        used again before all have heard it. Other memory is copied, and so is any with ``copy``.
        """
        allocation = None if copy else self._allocations.get(tensor.data_ptr())
        if allocation is None and tensor.numel():
            allocation = self._allocation_of(
                self.allocate(tensor.numel(), tensor.dtype).copy_(tensor)
            )
        return self._publish(allocation, tensor.numel() * tensor.itemsize)

    def publish_rows(self, rows: Rows) -> int:
        """Pass each other rank's row on to it; return the number of the message.

        Rows from ``allocate_rows`` are read where they are, others copied, as with ``publish``.
        """
        others = [rows[other] for other in self.others]
        first = others[0]
        allocation = self._allocations.get(first.data_ptr()) if isinstance(rows, list) else None
        if allocation is None and first.numel():
            copies = self.allocate(len(others) * first.numel(), first.dtype)
            for copied, row in zip(copies.view(len(others), -1), others, strict=True):
                copied.copy_(row)
            allocation = self._allocation_of(copies)
        return self._publish(allocation, len(others) * first.numel() * first.itemsize)

    def _allocation_of(self, tensor: torch.Tensor) -> _Allocation:
        return self._allocations[tensor.data_ptr()]

    def _publish(self, allocation: _Allocation | None, num_bytes: int) -> int:
        message = self._next
        slot = message % _MESSAGES
        if message >= _MESSAGES:
            if self._acknowledged[self.rank][slot] <= message - _MESSAGES:
                raise RuntimeError(  # or all would wait for one another
                    f"a collective has not been waited for, and {_MESSAGES} have been started "
                    "since: wait for the handles of unshard(async_op=True), or set "
                    "MESHARD_SHARED_MEMORY=0."
                )
            self._wait(self._acknowledged, message - _MESSAGES, "read what was passed on to it")
        self._next += 1
        if allocation is not None:
            allocation.message = message
            self._position[self.rank][slot] = allocation.begin
        self._size[self.rank][slot] = num_bytes
        self._published[self.rank][slot] = message + 1  # the last: who sees it sees the rest
        return message

    def is_published(self, message: int) -> bool:
        """Return whether all have said ``message``."""
        slot = message % _MESSAGES
        return all(self._published[other][slot] > message for other in self.others)

    def receive(self, message: int, other: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what rank ``other`` has said, where it lies, when it has been said.

        Args:
            message: Its number.
            other: Who says it.
            numel: Its elements.
            dtype: Their dtype.

        Raises:
            RuntimeError: That rank has said something else, or died, or did not say it in time.
        """
        return self._view(message, other, (numel, dtype), row=0, rows=1)

    def receive_own_row(
        self, message: int, other: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Likewise return this rank's row ``[numel]`` of the rows that rank ``other`` has said."""
        row = self.rank - (self.rank > other)  # nobody passes its own row on
        return self._view(message, other, (numel, dtype), row=row, rows=len(self.others))

    def _view(
        self, message: int, other: int, form: tuple[int, torch.dtype], *, row: int, rows: int
    ) -> torch.Tensor:
        self._wait(self._published, message, "join the collective", other)
        slot, (numel, dtype) = message % _MESSAGES, form
        num_bytes = numel * dtype.itemsize
        if self._size[other][slot] != rows * num_bytes:
            raise RuntimeError(
                f"rank {other} of the group sends {self._size[other][slot]} bytes where rank "
                f"{self.rank} expects {rows * num_bytes}: the ranks run different units. "
                "MESHARD_DEBUG=1 says which."
            )
        return self._segments[other].view(
            self._position[other][slot] + row * num_bytes, numel, dtype
        )

    def acknowledge(self, message: int) -> None:
        """Note that this rank reads nothing of ``message`` any more; also before it is said."""
        self._acknowledged[self.rank][message % _MESSAGES] = message + 1

    # --- waiting ---------------------------------------------------------------------------

    def _wait(
        self, words: list[memoryview], message: int, what: str, other: int | None = None
    ) -> None:
        slot = message % _MESSAGES
        for each in self.others if other is None else (other,):
            own = words[each]
            if own[slot] <= message:
                self._wait_long(own, slot, message, each, what)

    def _wait_long(self, own: memoryview, slot: int, message: int, other: int, what: str) -> None:
        for _ in range(_EAGER):
            os.sched_yield()
            if own[slot] > message:
                return
        start = time.monotonic()
        for count in range(1, 2**62):
            time.sleep(_NAPS[count > _CALLS_PER_CHECK])
            if own[slot] > message:
                return
            if count % _CALLS_PER_CHECK == 0:
                self._check(other, own[slot] <= message, time.monotonic() - start, what)

    def _check(self, other: int, is_missing: bool, seconds: float, what: str) -> None:
        if self._processes[other].has_ended and is_missing:
            raise RuntimeError(f"rank {other} of the group has ended and will not {what}.")
        if seconds > self._patience:
            raise RuntimeError(f"rank {other} of the group did not {what} in {seconds:.0f} s.")


def open_channel(group: dist.ProcessGroup, *, is_wanted: bool = True) -> Channel | None:
    """Return the neighbours, if all ranks of ``group`` can, and want to, share memory.

    **Collective:** all ranks of ``group``; two gathers of a few numbers.
    """
    own, token = None, secrets.randbits(62)
    if IS_SUPPORTED and is_wanted:
        with contextlib.suppress(OSError):  # the system forbids it, or there are too many files
            own = Segment.create(_START)
            own.words(8 * _TOKEN_WORD, 1)[0] = token
    introduction = [os.getpid(), -1 if own is None else own.descriptor, token]
    segments, processes = [], []
    for rank, introduced in enumerate(exchange_numbers(introduction, group)):
        process, descriptor, expected = introduced
        segment = own if rank == group.rank() else _open(process, descriptor, expected)
        if segment is None:
            break
        segments.append(segment)
        processes.append(process)
    channel = None
    if len(segments) == group.size():
        with contextlib.suppress(OSError):
            patience = timeout_of(group).total_seconds()
            channel = Channel(segments, processes, group.rank(), patience)
    # All or none: a rank that is alone with its view of the others would wait for ever.
    has_met = exchange_numbers([int(channel is not None)], group)
    return channel if all(met for (met,) in has_met) else None


def _open(process: int, descriptor: int, token: int) -> Segment | None:
    """Return the segment of another rank; None if it cannot be reached, or is another's."""
    with contextlib.suppress(OSError, ValueError):
        segment = Segment.open(process, descriptor)
        if segment.words(8 * _TOKEN_WORD, 1)[0] == token:
            return segment
    return None
