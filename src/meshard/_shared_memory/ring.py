"""Memory that the ranks of one host share, as a ring of slots.

All ranks of a group map one segment, which its first rank has made. Each collective takes the next
slot of the ring. Where that lies follows from the sizes of all collectives so far, which are the
same on all ranks, so nothing has to be agreed on. A rank writes its part of the slot and then
*publishes* it: it raises its number of published collectives. The others read the part in place
once they see that number. A rank that needs the slot no more *releases* it, and a slot is used
again once all ranks have released what lay there.

A segment is an anonymous file in memory, which other processes open through the process id and the
descriptor of its owner. It has no name, so a process that dies leaves nothing behind. Only pages
that were touched take memory, and the size of ``/dev/shm`` is no limit. Only processes of the same
user can open it. It is sealed against shrinking, which would crash processes that read it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.blocking import exchange_numbers
from meshard._comm.communicator import ranged
from meshard._comm.divergence import REMEDY
from meshard._comm.stalls import Collective, Waiting
from meshard._torch.private import timeout_of

if sys.platform == "linux":
    import fcntl

# Why ranks cannot share memory on this machine; empty if they can. A sender writes first the data,
# then its number of published collectives. Another process may read the data once it sees the
# number, so the two writes must become visible in this order. x86-64 guarantees that for ordinary
# stores, and memcpy ends other ones by a fence. Other processors need fences, which Python lacks,
# so there all ranks send through gloo.
WHY_UNSUPPORTED = ""
if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
    WHY_UNSUPPORTED = "this system has no memfd_create or no pidfd_open (Linux has them)"
elif platform.machine().lower() not in ("x86_64", "amd64"):
    WHY_UNSUPPORTED = f"{platform.machine()} may reorder stores; it needs x86-64"

_LINE = 64  # bytes of a cache line: the numbers of a rank share no line with those of others
_NAMES = 64  # as many collectives may be in flight at once
_NAME_BYTES = 192
_ROOM = 3  # the ring holds the largest slot so often
_EAGER = 200  # polls before a waiting thread sleeps, because most ranks come soon
_NAPS = (5e-5, 5e-4)  # seconds per sleep: for the first ``_NAPS_PER_CHECK`` sleeps, and later
_NAPS_PER_CHECK = 200
_OPENING = "set-up of shared memory, before the first collective of these ranks"


def _aligned(num_bytes: int, alignment: int = _LINE) -> int:
    return -(-num_bytes // alignment) * alignment


class _Segment:
    """A file in memory that several processes map. It is as long as any of them has needed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map: mmap.mmap | None = None

    def view(self, begin: int, num_bytes: int) -> memoryview:
        """Return a range. It stays valid if the file is mapped anew because it has grown."""
        end = begin + num_bytes
        if self._map is None or end > len(self._map):
            size = 0 if self._map is None else 2 * len(self._map)
            try:
                if os.fstat(self.descriptor).st_size < end:
                    with contextlib.suppress(PermissionError):  # another rank has made it longer
                        os.ftruncate(self.descriptor, max(end, size))
                self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            except OSError as error:
                # No fallback to sockets: other ranks have begun this collective in shared memory.
                raise RuntimeError(
                    f"shared memory of {end} bytes between ranks could not be had "
                    f"({error.strerror}): raise the limit of this process (`ulimit -f` for the "
                    "size of files, `ulimit -v` for its memory), or send through sockets with "
                    "MESHARD_SHARED_MEMORY=0."
                ) from error
        return memoryview(self._map)[begin:end]


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


class _Slot(NamedTuple):
    number: int
    begin: int
    end: int
    capacity: int  # of the ring, from this slot on


class Ring:
    """The shared memory of a group, as seen by one of its ranks."""

    def __init__(self, segment: _Segment, processes: list[int], group: dist.ProcessGroup) -> None:
        self.rank, count = group.rank(), len(processes)
        self.process = processes[self.rank]
        self._segment = segment
        self._ranks = dist.get_process_group_ranks(group)  # in the default group
        self._others = [other for other in range(count) if other != self.rank]
        self._processes = {other: _Process(processes[other]) for other in self._others}
        self._patience = timeout_of(group, torch.device("cpu")).total_seconds()
        # Each number is a word of 8 bytes that one rank writes, so there are no locks.
        words = [segment.view(_LINE * (1 + each), 16).cast("q") for each in range(count)]
        self._published, self._released = [w[:1] for w in words], [w[1:] for w in words]
        start, size = _LINE * (1 + count), _NAMES * _NAME_BYTES
        self._names = [segment.view(start + each * size, size) for each in range(count)]
        self._start = _aligned(start + count * size, mmap.PAGESIZE)
        self._last = _Slot(number=-1, begin=0, end=0, capacity=0)  # that was published
        self._slots: deque[_Slot] = deque()  # those not used again yet, oldest first
        self._taken: _Slot | None = None  # the slot of the next collective
        self._users: weakref.WeakValueDictionary[int, SlotHandle] = weakref.WeakValueDictionary()
        self._unreleased: set[int] = set()

    # --- slots -----------------------------------------------------------------------------

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the slot of the next collective, once all ranks have released what lay there.

        If it is not published, the next call for as many bytes returns the same memory.
        """
        numel, number, head = math.prod(shape), self._last.number + 1, self._last.end
        num_bytes = _aligned(numel * dtype.itemsize)
        capacity = max(self._last.capacity, _ROOM * num_bytes)
        begin = head if head + num_bytes <= capacity else 0
        end = begin + num_bytes
        stale = [each.number for each in self._slots if each.begin < end and begin < each.end]
        last = max([number - _NAMES, *stale])  # the name of that number is overwritten
        if last >= 0:
            self._wait_until_released(last)
        while self._slots and self._slots[0].number <= last:
            self._slots.popleft()  # only now: the wait may be interrupted
        self._taken = _Slot(number, begin, end, capacity)
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        memory = self._segment.view(self._start + begin, numel * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def _wait_until_released(self, last: int) -> None:
        # This rank first finishes its own collectives that lie there. So do all ranks before they
        # start the same collective, and so none waits for a rank that waits for it.
        for number in sorted(self._unreleased):
            if number <= last:
                user = self._users.get(number)
                if user is not None:
                    user.give_way()
                self.release(number)  # also if its user was interrupted as it began or ended
        for other in self._others:
            self._wait(self._released, other, last, "read what was published")

    def publish(self, name: str, user: SlotHandle) -> None:
        """Publish this rank's part of the slot that was taken, and number the collective."""
        # An interrupt may come between any two of these lines, and so may ``release`` of another
        # handle that is dropped.
        slot, self._taken = self._taken, None
        assert slot is not None
        self._unreleased.add(slot.number)
        # The place is compared too: after an error that was caught, ranks may differ in it.
        self._name(self.rank, slot.number)[:] = _encoded(f"at {slot.begin}, {name}")
        self._slots.append(slot)
        self._last = slot
        self._published[self.rank][0] = slot.number + 1  # others read the rest after it
        user.number = slot.number
        self._users[slot.number] = user

    def release(self, number: int) -> None:
        self._unreleased.discard(number)
        word = self._released[self.rank]
        # Another handle may be dropped, and so released, between the two: look again.
        while word[0] != (least := min(self._unreleased, default=self._last.number + 1)):
            word[0] = least

    # --- waiting ---------------------------------------------------------------------------

    def is_published(self, number: int) -> bool:
        """Whether all other ranks have published their part."""
        return all(self._published[other][0] > number for other in self._others)

    def wait(self, number: int) -> None:
        """Wait until all ranks have published their part. Raise if they run other collectives."""
        own = self._name(self.rank, number)
        for other in self._others:
            self._wait(self._published, other, number, "join the collective")
            if self._name(other, number) != own:
                self._raise_difference(number, other)

    def _name(self, rank: int, number: int) -> memoryview:
        begin = number % _NAMES * _NAME_BYTES
        return self._names[rank][begin : begin + _NAME_BYTES]

    def _raise_difference(self, number: int, other: int) -> None:
        lines = [
            f"  rank {rank} of the group: "
            + ", ".join(reversed(_decoded(self._name(rank, number))))
            for rank in sorted((self.rank, other))
        ]
        raise RuntimeError(
            f"the ranks have issued different collectives (number {number} of the group):\n"
            + "\n".join(lines)
            + f"\n{REMEDY} If only the sizes differ, the unit must have parameters of the same "
            "shapes and dtypes, and the same policies, on all ranks. A rank that caught an "
            "exception in the middle of a step may have left some out. What was issued cannot be "
            "taken back: end the job. MESHARD_DEBUG=1 stops at the first difference."
        )

    def _wait(self, words: list[memoryview], other: int, number: int, what: str) -> None:
        word = words[other]
        if word[0] > number:
            return
        for _ in range(_EAGER):
            os.sched_yield()
            if word[0] > number:
                return

        def missing() -> list[int]:
            return [self._ranks[each] for each in self._others if words[each][0] <= number]

        with Waiting(_decoded(self._name(self.rank, number))[-1], missing=missing):
            self._nap_until(word, other, number, what)

    def _nap_until(self, word: memoryview, other: int, number: int, what: str) -> None:
        start, count = time.monotonic(), 0
        while word[0] <= number:
            time.sleep(_NAPS[count > _NAPS_PER_CHECK])
            count += 1
            if count % _NAPS_PER_CHECK:
                continue
            # The rank may have written its number just before its end, so it is read again.
            if self._processes[other].has_ended and word[0] <= number:
                raise RuntimeError(
                    f"rank {other} of the group has ended and will not {what}. If it did not fail, "
                    "it had fewer batches or microbatches than this rank."
                )
            seconds = time.monotonic() - start
            if seconds > self._patience:
                raise RuntimeError(f"rank {other} of the group did not {what} in {seconds:.0f} s.")


@functools.lru_cache(maxsize=1024)
def _encoded(name: str) -> bytes:
    return name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _decoded(name: memoryview) -> list[str]:
    """Return the lines of a name: what is sent, and the collective."""
    return bytes(name).rstrip(b"\0").decode(errors="replace").split("\n")


class SlotHandle:
    """A collective in which this rank reads what the others have written to a slot.

    ``then`` computes the result from the slot; None: the slot is the result. It must not refer to
    this object, as such a cycle would delay ``__del__``.
    """

    def __init__(
        self,
        ring: Ring,
        collective: Collective,
        name: str,
        result: torch.Tensor,
        then: Callable[[], object] | None = None,
    ) -> None:
        self.result = result
        self._collective = collective
        self._ring = ring
        self._then = then
        self._is_open = True  # until the slot is released
        self.number = -1  # set by ``publish``
        ring.publish(name, self)

    def wait(self) -> None:
        if not self._is_open:
            return
        # The calling thread reads what others have published. This counts as a wait too.
        with ranged("wait", *self._collective):
            self._ring.wait(self.number)
            if self._then is not None:
                self._then()
        if self._then is not None:
            self.release()

    synchronize = wait

    def done(self) -> bool:
        return not self._is_open or self._ring.is_published(self.number)

    def release(self) -> None:
        if self._is_open:
            self._ring.release(self.number)
            self._is_open, self._then = False, None

    def give_way(self) -> None:
        self.wait()
        if self._is_open:
            self.result = self.result.clone()
            self.release()

    def __del__(self) -> None:
        # If the collective was dropped unfinished, as when the model is deleted, other ranks must
        # not wait for this one. But a forked process, which has a copy of this object, must not
        # release the slot in the name of the rank.
        if self._ring.process == os.getpid():
            self.release()


def open_ring(group: dist.ProcessGroup, *, is_wanted: bool = True) -> Ring | None:
    """Return the ring of ``group`` if all of its ranks can, and want to, share memory.

    **Collective:** all ranks of ``group``; two all-gathers of a few numbers.
    """
    own, token, cpu = None, secrets.randbits(62), torch.device("cpu")
    if not WHY_UNSUPPORTED and is_wanted:
        with contextlib.suppress(OSError):  # memfd_create is forbidden, or too many files are open
            own = _create(token)
    introduction = [os.getpid(), -1 if own is None else own.descriptor, token]
    introductions = exchange_numbers(introduction, group, cpu, purpose=_OPENING)
    segment = own if group.rank() == 0 else _open(*introductions[0])
    ring = None
    if own is not None and segment is not None:
        with contextlib.suppress(OSError):
            ring = Ring(segment, [process for process, _, _ in introductions], group)
    # All ranks or none: a rank with a ring would wait there for what others send through sockets.
    is_open = exchange_numbers([int(ring is not None)], group, cpu, purpose=_OPENING)
    return ring if all(has for (has,) in is_open) else None


def _create(token: int) -> _Segment:
    segment = _Segment(os.memfd_create("meshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.fchmod(segment.descriptor, 0o600)
    fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    segment.view(0, 8).cast("q")[0] = token
    return segment


def _open(process: int, descriptor: int, token: int) -> _Segment | None:
    """Return the segment of another rank; None if it cannot be opened or has another token."""
    # If the rank is on another host, ``process`` and ``descriptor`` may by chance name some file of
    # this host.
    with contextlib.suppress(OSError, ValueError):
        segment = _Segment(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        has_token = os.fstat(segment.descriptor).st_size >= 8
        if has_token and segment.view(0, 8).cast("q")[0] == token:
            return segment
    return None
