"""Anonymous shared memory of one process.

Each makes an anonymous file in memory, which its neighbours open by the number of its process and
of its descriptor. It has no name, so nothing is left behind by a process that dies, and no size but
that of what has been touched, so it is not bound by the size of ``/dev/shm``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 64  # bytes: a cache line
_STEP = 2**24  # bytes by which a file grows at least; only what is touched is memory

# The stores of one processor are seen by others in their order, without a fence, which Python does
# not have: so it is on x86, and not on Arm.
IS_SUPPORTED = (
    hasattr(os, "memfd_create")
    and hasattr(os, "pidfd_open")
    and platform.machine().lower() in ("x86_64", "amd64")
)


def aligned(num_bytes: int) -> int:
    """Round up to whole cache lines.

    >>> aligned(65)
    128
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Segment:
    """An anonymous file in memory that several processes map.

    Args:
        descriptor: Of the open file; taken over.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Make one of this process's own."""
        descriptor = os.memfd_create("meshard")
        os.ftruncate(descriptor, max(num_bytes, _STEP))
        return cls(descriptor)

    @classmethod
    def open(cls, process: int, descriptor: int) -> Segment:
        """Map that of another process.

        Raises:
            OSError: There is none, or not on this host, or it may not be opened.
        """
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def reserve(self, num_bytes: int) -> None:
        """Have at least so many bytes. Only the process that made it calls this."""
        if num_bytes > len(self._map):
            os.ftruncate(self.descriptor, max(num_bytes, 2 * len(self._map)))
            self._reach(num_bytes)

    def _reach(self, end: int) -> None:
        """Map what has been added since; what looks into the old map keeps it."""
        if end > len(self._map):
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)

    def release_pages(self, begin: int, end: int) -> None:
        """Have no memory behind the whole pages of a range: it is zero when it is next read."""
        begin, end = (
            -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE,
            end // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if begin < end:
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def words(self, offset: int, count: int) -> memoryview:
        """Return ``count`` numbers of 8 bytes, each read and written at once."""
        return memoryview(self._map)[offset : offset + 8 * count].cast("q")

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what lies at ``offset`` as a tensor ``[numel]``."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        self._reach(offset + numel * dtype.itemsize)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def allocate(
        self, offset: int, numel: int, dtype: torch.dtype, then: Callable[[Any], object]
    ) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """Return a tensor at ``offset``, and what calls ``then`` when its memory is let go of.

        A tensor's views share its storage, and the storage holds the object that is watched.
        """
        watched = (ctypes.c_char * (numel * dtype.itemsize)).from_buffer(self._map, offset)
        return torch.frombuffer(watched, dtype=dtype), weakref.ref(watched, then)


class FirstFit:
    """Which ranges of a segment are free? Neighbouring ones are joined, the first that fits taken.

    Args:
        start: Where the ranges begin; there is no end.
    """

    def __init__(self, start: int) -> None:
        self.ranges: list[tuple[int, int]] = []  # begin and end, in order
        self._end = start

    def fits(self, num_bytes: int) -> bool:
        """Return whether there is room before the end."""
        return any(end - begin >= num_bytes for begin, end in self.ranges)

    def take(self, num_bytes: int) -> int:
        """Return where ``num_bytes`` are free, and take them."""
        for position, (begin, end) in enumerate(self.ranges):
            if end - begin >= num_bytes:
                if end - begin == num_bytes:
                    del self.ranges[position]
                else:
                    self.ranges[position] = (begin + num_bytes, end)
                return begin
        begin = self._end
        if self.ranges and self.ranges[-1][1] == begin:
            begin = self.ranges.pop()[0]  # what is free at the end, and more
        self._end = begin + num_bytes
        return begin

    def give(self, begin: int, num_bytes: int) -> None:
        """Have a range that was taken back."""
        end = begin + num_bytes
        position = next(
            (i for i, each in enumerate(self.ranges) if each[0] > begin), len(self.ranges)
        )
        if position < len(self.ranges) and self.ranges[position][0] == end:
            end = self.ranges.pop(position)[1]
        if position and self.ranges[position - 1][1] == begin:
            position -= 1
            begin = self.ranges.pop(position)[0]
        self.ranges.insert(position, (begin, end))
