"""Messages between the ranks of one host.

Every rank has a segment that the others map. To *publish* a message, it writes the data to its
segment and then the number of the message. The others wait for that number, read the data in place,
and *acknowledge* the message. After that the memory may be reused. All ranks of a group number
their collectives alike, so a number identifies a collective. Each message has a *name*, which says
which collective the sender runs; receivers compare it with the name of their own. Numbers, places
and names are *words* of 8 bytes. Each word is written by one rank only, so there are no locks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import time
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.blocking import exchange_numbers
from meshard._comm.communicator import Rows, StepPhase
from meshard._comm.divergence import REMEDY
from meshard._comm.stalls import Waiting
from meshard._shared_memory.segment import WHY_UNSUPPORTED, FirstFit, Segment, aligned
from meshard._torch.private import timeout_of

# Messages that may be in flight at once: the start of a segment has five words for each.
_MESSAGES = 4096
_TOKEN_WORD = 5 * _MESSAGES
_TEXTS = 8 * (_TOKEN_WORD + 1)  # where the names begin, each followed by a zero byte
_START = aligned(_TEXTS + 2**20)

# Operation, unit, and name of the root.
Name = tuple[str, str, str]

_EAGER = 200  # polls before the waiting thread sleeps, because most messages come soon
_NAPS = (5e-5, 5e-4)  # seconds per sleep: for the first ``_NAPS_PER_CHECK`` sleeps, and later
_NAPS_PER_CHECK = 200
_STEPS_TO_REMEMBER = 4
_LARGE = 2**16  # bytes: from this size on, ``allocate`` waits for memory before it takes more
_OPENING = "set-up of shared memory, before the first collective of these ranks"
_SHORT = 2e-3  # seconds to wait for memory; not longer, as the other ranks may wait for this one


@dataclass(slots=True, eq=False)
class _Allocation:
    """A range of this rank's segment."""

    begin: int
    num_bytes: int
    message: int = -1  # the last message that was published from it
    watch: weakref.ref[Any] | None = None  # kept alive for its callback


class _Process:
    """Another process. A pidfd watches it, as its process id may be reused once it has ended."""

    def __init__(self, number: int) -> None:
        descriptor = os.pidfd_open(number)
        weakref.finalize(self, os.close, descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    @property
    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))


class Channel:
    """The segments and processes of all ranks of a group on one host, by rank."""

    def __init__(
        self, segments: list[Segment], processes: list[int], group: dist.ProcessGroup
    ) -> None:
        rank = self.rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)  # in the default group
        self.process = processes[rank]
        self.others = [other for other in range(len(segments)) if other != rank]
        self._segments = segments
        self._own = segments[rank]
        words = [segment.words(0, 5 * _MESSAGES) for segment in segments]
        self._published, self._position, self._size, self._name, self._acknowledged = (
            [each[kind * _MESSAGES : (kind + 1) * _MESSAGES] for each in words] for kind in range(5)
        )
        self._texts = [segment.memory(_TEXTS, _START) for segment in segments]
        self._num_text_bytes = 0  # how many bytes of names this rank has written
        self._name_words: dict[Name, int] = {}
        self._spoken: dict[int, str] = {}  # the text of each name, by its word
        # Seconds after which a wait gives up.
        self._patience = timeout_of(group, torch.device("cpu")).total_seconds()
        self._processes = {other: _Process(processes[other]) for other in self.others}
        self._next = 0  # number of the next message
        self._released_at = 0  # ``_next`` at the last release_cached_memory()
        self._is_bare = False  # whether that release had ``is_tight``
        self._reach = 0  # the end of the highest range used in this phase of the step
        self._phase = StepPhase.FORWARD
        self._reached: dict[StepPhase, deque[int]] = {
            phase: deque(maxlen=_STEPS_TO_REMEMBER)
            for phase in (StepPhase.FORWARD, StepPhase.BACKWARD)
        }
        self._free = FirstFit(_START)
        self._allocations: dict[int, _Allocation] = {}  # of living tensors, by address
        # Weak-reference callbacks append to the deque at any moment. Only _reclaim pops from it.
        self._freed: deque[_Allocation] = deque()
        # Allocations whose tensor is freed, but whose message not all ranks have acknowledged.
        self._unacknowledged: list[_Allocation] = []

    # --- memory ----------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised ``[numel]`` that can be published without a copy."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        self._reclaim()
        num_bytes = aligned(numel * dtype.itemsize)
        if num_bytes >= _LARGE and self._unacknowledged:
            self._wait_for_memory(num_bytes)
        begin = self._free.take(num_bytes)
        try:
            self._own.reserve(begin + num_bytes)
        except RuntimeError:
            self._free.give(begin, num_bytes)
            raise
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

    def allocate_rows(self, numel: int, dtype: torch.dtype) -> Rows:
        """Return a block ``[1, numel]`` per rank, for ``publish_rows``.

        The block of this rank is in private memory, because it is not sent.
        """
        count = len(self.others)
        rows = list(self.allocate(count * numel, dtype).view(count, 1, numel))
        rows.insert(self.rank, torch.empty(1, numel, dtype=dtype, device="cpu"))
        return rows

    def _wait_for_memory(self, num_bytes: int) -> None:
        """Wait briefly for memory that another rank is about to acknowledge, before growing."""
        until = time.monotonic() + _SHORT
        while not self._free.fits(num_bytes) and self._unacknowledged and time.monotonic() < until:
            time.sleep(_NAPS[0])
            self._reclaim()

    def release_cached_memory(self, phase: StepPhase, *, is_tight: bool = False) -> None:
        """Return the memory of free ranges to the OS, as ``phase`` begins.

        Memory up to the highest address that recent steps used is kept, because the next step needs
        it again. As a backward begins, only recent backwards count, because the memory of a step
        peaks in the backward. As another phase begins, recent forwards and backwards count. With
        ``is_tight``, nothing is kept.
        """
        is_new = self._released_at != self._next
        if is_new:
            self._released_at = self._next
            self._reached[self._phase].append(self._reach)
            self._reach = 0
        if phase in self._reached:
            self._phase = phase
        elif not is_new and not is_tight:
            return  # each unit calls this before an optimizer steps; the first call has released
        phases = (phase,) if phase is StepPhase.BACKWARD else self._reached
        known = [reach for each in phases for reach in self._reached[each]]
        if (self._is_bare and not is_new) or not known:
            return
        keep = 0 if is_tight else max(known)
        self._is_bare = is_tight
        self._reclaim()
        for begin, end in self._free.ranges:
            self._own.release_pages(max(begin, keep), min(end, self._free.reached))

    def _reclaim(self) -> None:
        while self._freed:
            self._unacknowledged.append(self._freed.popleft())
        freed, self._unacknowledged = self._unacknowledged, []
        for each in freed:
            slot = each.message % _MESSAGES
            words = [self._acknowledged[other][slot] for other in self.others]
            if each.message < 0 or min(words) > each.message:
                self._free.give(each.begin, each.num_bytes)
            else:
                self._unacknowledged.append(each)

    # --- messages --------------------------------------------------------------------------

    def publish(self, tensor: torch.Tensor, name: Name, *, copy: bool = False) -> int:
        """Publish ``tensor`` to all other ranks; return the number of the message.

        If ``tensor`` comes from ``allocate``, the other ranks read it in place. It must not be
        written to again, and its memory is reused only after all ranks have acknowledged the
        message. Any other tensor is copied to such memory first; with ``copy`` every tensor is.
        """
        return self._publish([tensor.view(-1)], name, copy=copy)

    def publish_rows(self, rows: list[torch.Tensor], name: Name) -> int:
        """Publish to each other rank its row. Rows of ``allocate_rows`` are read in place."""
        return self._publish([rows[other] for other in self.others], name)

    def _publish(self, parts: list[torch.Tensor], name: Name, *, copy: bool = False) -> int:
        numel, dtype = parts[0].numel(), parts[0].dtype
        allocation = None if copy else self._allocations.get(parts[0].data_ptr())
        if allocation is None and numel:
            copies = self.allocate(len(parts) * numel, dtype)
            for copied, part in zip(copies.view(len(parts), -1), parts, strict=True):
                copied.copy_(part)
            allocation = self._allocations[copies.data_ptr()]
        message = self._next
        slot = message % _MESSAGES
        if message >= _MESSAGES:
            if self._acknowledged[self.rank][slot] <= message - _MESSAGES:
                raise RuntimeError(  # otherwise, this rank would wait for itself
                    f"a collective has not been waited for, and {_MESSAGES} have been started "
                    "since: wait for the handles of unshard(async_op=True), or set "
                    "MESHARD_SHARED_MEMORY=0."
                )
            self._wait(self._acknowledged, message - _MESSAGES, "read what was published")
        self._next += 1
        if allocation is not None:
            allocation.message = message
            self._position[self.rank][slot] = allocation.begin
        self._size[self.rank][slot] = len(parts) * numel * dtype.itemsize
        word = self._name_words.get(name)
        self._name[self.rank][slot] = self._make_word(name) if word is None else word
        self._published[self.rank][slot] = message + 1  # last, as others read the rest after it
        return message

    def _make_word(self, name: Name) -> int:
        """Write the text of ``name`` for other ranks. Return a word with its place and checksum."""
        op, unit, root = name
        begin, texts = self._num_text_bytes, self._texts[self.rank]
        spoken = f"{op} of unit {unit!r} ({root})"
        text = spoken.encode()[: len(texts) - 1 - begin]
        texts[begin : begin + len(text)] = text
        self._num_text_bytes = min(begin + len(text) + 1, len(texts) - 1)
        word = self._name_words[name] = begin << 32 | zlib.crc32(repr(name).encode())
        self._spoken[word] = spoken
        return word

    def _check_names(self, message: int, other: int) -> None:
        """Raise unless this rank and rank ``other`` gave ``message`` the same name."""
        ranks, slot = sorted((self.rank, other)), message % _MESSAGES
        if len({self._name[rank][slot] % 2**32 for rank in ranks}) == 1:
            return  # the checksums are the same; only the places of the texts differ
        lines = [f"  rank {rank} of the group: {self._text_of(rank, slot)}" for rank in ranks]
        raise RuntimeError(
            f"the ranks have issued different collectives (message {message} of the group):\n"
            + "\n".join(lines)
            + f"\n{REMEDY} A rank that caught an exception in the middle of a step may have left "
            "some out. What was issued cannot be taken back: end the job. MESHARD_DEBUG=1 stops at "
            "the first difference."
        )

    def _text_of(self, rank: int, slot: int) -> str:
        text = self._texts[rank][self._name[rank][slot] >> 32 :]
        return bytes(text).partition(b"\0")[0].decode(errors="replace")

    def is_published(self, message: int) -> bool:
        """Whether all other ranks have published ``message``."""
        slot = message % _MESSAGES
        return all(self._published[other][slot] > message for other in self.others)

    def receive(
        self, message: int, other: int, numel: int, dtype: torch.dtype, *, is_row: bool = False
    ) -> torch.Tensor:
        """Wait for what rank ``other`` publishes as ``message``; return it in place, ``[numel]``.

        With ``is_row``, return this rank's row of the rows that ``other`` publishes.
        """
        self._wait(self._published, message, "join the collective", other)
        slot, num_bytes = message % _MESSAGES, numel * dtype.itemsize
        if self._name[other][slot] != self._name[self.rank][slot]:
            self._check_names(message, other)
        count = len(self.others) if is_row else 1
        if self._size[other][slot] != count * num_bytes:
            raise RuntimeError(
                f"{self._text_of(other, slot)}: rank {other} of the group sends "
                f"{self._size[other][slot]} bytes where rank {self.rank} expects "
                f"{count * num_bytes}; the unit must have parameters of the same shapes and "
                "dtypes, and the same policies, on all ranks."
            )
        # ``other`` publishes no row for itself, so rows of later ranks are one position earlier.
        row = self.rank - (self.rank > other) if is_row else 0
        begin = self._position[other][slot] + row * num_bytes
        return self._segments[other].view(begin, numel, dtype)

    def receive_all(
        self, message: int, own: torch.Tensor, *, is_row: bool = False
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order: ``own``, and those of ``receive``."""
        numel, dtype = own.numel(), own.dtype
        rows = [self.receive(message, each, numel, dtype, is_row=is_row) for each in self.others]
        rows.insert(self.rank, own)
        return rows

    def acknowledge(self, message: int) -> None:
        """Tell the others that this rank has read ``message``, or that it never will."""
        self._acknowledged[self.rank][message % _MESSAGES] = message + 1

    # --- waiting ---------------------------------------------------------------------------

    def _wait(
        self, words: list[memoryview], message: int, what: str, other: int | None = None
    ) -> None:
        slot = message % _MESSAGES
        for each in self.others if other is None else (other,):
            if words[each][slot] <= message:
                self._wait_long(words, slot, message, each, what)

    def _wait_long(
        self, words: list[memoryview], slot: int, message: int, other: int, what: str
    ) -> None:
        own = words[other]
        for _ in range(_EAGER):
            os.sched_yield()
            if own[slot] > message:
                return

        def missing() -> list[int]:
            return [self._ranks[each] for each in self.others if words[each][slot] <= message]

        spoken = self._spoken.get(self._name[self.rank][slot], "a message")
        with Waiting(spoken, missing=missing):
            self._nap_until(own, slot, message, other, what)

    def _nap_until(self, own: memoryview, slot: int, message: int, other: int, what: str) -> None:
        start = time.monotonic()
        for count in itertools.count(1):
            time.sleep(_NAPS[count > _NAPS_PER_CHECK])
            if own[slot] > message:
                return
            if count % _NAPS_PER_CHECK == 0:
                # The rank may have written ``own[slot]`` just before its end, so it is read again.
                if self._processes[other].has_ended and own[slot] <= message:
                    raise RuntimeError(
                        f"rank {other} of the group has ended and will not {what}. If it did not "
                        "fail, it had fewer batches or microbatches than this rank."
                    )
                seconds = time.monotonic() - start
                if seconds > self._patience:
                    raise RuntimeError(
                        f"rank {other} of the group did not {what} in {seconds:.0f} s."
                    )


def open_channel(group: dist.ProcessGroup, *, is_wanted: bool = True) -> Channel | None:
    """Return a channel between the ranks of ``group`` if all can, and want to, share memory.

    **Collective:** all ranks of ``group``; two all-gathers of a few numbers.
    """
    own, token, cpu = None, secrets.randbits(62), torch.device("cpu")
    if not WHY_UNSUPPORTED and is_wanted:
        with contextlib.suppress(OSError):  # memfd_create is forbidden, or too many files are open
            own = Segment.create(_START)
            own.words(8 * _TOKEN_WORD, 1)[0] = token
    introduction = [os.getpid(), -1 if own is None else own.descriptor, token]
    segments, processes = [], []
    introductions = exchange_numbers(introduction, group, cpu, purpose=_OPENING)
    for rank, introduced in enumerate(introductions):
        process, descriptor, expected = introduced
        segment = own if rank == group.rank() else _open(process, descriptor, expected)
        if segment is None:
            break
        segments.append(segment)
        processes.append(process)
    channel = None
    if len(segments) == group.size():
        with contextlib.suppress(OSError):
            channel = Channel(segments, processes, group)
    # All ranks or none: a rank with a channel would wait there for messages that the others send
    # through sockets.
    is_open = exchange_numbers([int(channel is not None)], group, cpu, purpose=_OPENING)
    return channel if all(own for (own,) in is_open) else None


def _open(process: int, descriptor: int, token: int) -> Segment | None:
    """Return the segment of another rank; None if it cannot be opened or has another token."""
    # If the rank is on another host, ``process`` and ``descriptor`` may by chance name some file of
    # this host. That file may be too short to contain a token.
    with contextlib.suppress(OSError, ValueError, IndexError, TypeError):
        segment = Segment.open(process, descriptor)
        if segment.words(8 * _TOKEN_WORD, 1)[0] == token:
            return segment
    return None
