"""Anonymous shared memory of one process.

A segment is an anonymous file in memory, which other processes open through the process id and the
descriptor of its owner. It has no name, so a process that dies leaves nothing behind. Only pages
that were touched take memory, and the size of ``/dev/shm`` is no limit. Only processes of the same
user can open it. It is sealed against shrinking, which would crash processes that read it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

if sys.platform == "linux":
    import fcntl

ALIGNMENT = 64  # bytes: a cache line
_STEP = 2**24  # minimal bytes of a new file; only pages that are touched take memory

# Why ranks cannot share memory on this machine; empty if they can. A sender writes first the data,
# then the number of the message. Another process may read the data once it sees the number, so the
# two writes must become visible in this order. x86-64 guarantees that. Other processors need
# fences, which Python lacks, so there all ranks send through gloo.
WHY_UNSUPPORTED = ""
if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
    WHY_UNSUPPORTED = "this system has no memfd_create or no pidfd_open (Linux has them)"
elif platform.machine().lower() not in ("x86_64", "amd64"):
    WHY_UNSUPPORTED = f"{platform.machine()} may reorder stores; it needs x86-64"


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up to whole cache lines, or pages.

    >>> aligned(65)
    128
    """
    return -(-num_bytes // alignment) * alignment


class Segment:
    """An anonymous file in memory that several processes map.

    The segment closes ``descriptor`` when it is freed. If ``num_bytes`` is given, the file is new
    and gets this size.
    """

    def __init__(self, descriptor: int, num_bytes: int = 0) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        if num_bytes:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return cls(os.memfd_create("meshard", flags), max(num_bytes, _STEP))

    @classmethod
    def open(cls, process: int, descriptor: int) -> Segment:
        """Map a segment of another process.

        If that process is on another host, this maps another file, or raises OSError or ValueError.
        """
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def reserve(self, num_bytes: int) -> None:
        """Grow to at least ``num_bytes``. Only the process that created the file may call this."""
        if num_bytes > len(self._map):
            self._reach(num_bytes, grow_to=max(num_bytes, 2 * len(self._map)))

    def _reach(self, end: int, *, grow_to: int = 0) -> None:
        """Map the file up to ``end``. Views of the old map keep the old map alive."""
        if end <= len(self._map):
            return
        try:
            if grow_to:
                os.ftruncate(self.descriptor, grow_to)
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        except OSError as error:
            # No fallback to sockets: the other ranks have begun this collective in shared memory.
            raise RuntimeError(
                f"shared memory of {end} bytes between ranks could not be "
                f"{'allocated' if grow_to else 'mapped'} ({error.strerror}): raise the limit of "
                "this process (`ulimit -f` for the size of files, `ulimit -v` for its memory), or "
                "send through sockets with MESHARD_SHARED_MEMORY=0."
            ) from error

    def release_pages(self, begin: int, end: int) -> None:
        """Return the whole pages of a range to the OS; they read as zero afterwards."""
        begin, end = aligned(begin, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def words(self, offset: int, count: int) -> memoryview:
        """Return ``count`` numbers of 8 bytes, each read and written in one access."""
        return self.memory(offset, offset + 8 * count).cast("q")

    def memory(self, begin: int, end: int) -> memoryview:
        """Return a range of the current map. It stays valid when the segment grows."""
        return memoryview(self._map)[begin:end]

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory at ``offset`` as a tensor ``[numel]``."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        self._reach(offset + numel * dtype.itemsize)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def allocate(
        self, offset: int, numel: int, dtype: torch.dtype, then: Callable[[Any], object]
    ) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """Return a tensor at ``offset``, and a weak reference that calls ``then`` when it is freed.

        The reference is not to the tensor but to the buffer object that its storage keeps alive. So
        ``then`` is called only after all views of the tensor are freed too.
        """
        watched = (ctypes.c_char * (numel * dtype.itemsize)).from_buffer(self._map, offset)
        return torch.frombuffer(watched, dtype=dtype), weakref.ref(watched, then)


class FirstFit:
    """The free ranges of a segment. Adjacent ones are merged; the first that fits is taken."""

    def __init__(self, start: int) -> None:
        self.ranges = [(start, sys.maxsize)]  # begin and end, in order; there is always room
        self.reached = start  # the end of the highest range that was ever taken

    def fits(self, num_bytes: int) -> bool:
        """Return whether there is room below ``reached``."""
        return any(min(end, self.reached) - begin >= num_bytes for begin, end in self.ranges)

    def take(self, num_bytes: int) -> int:
        """Take ``num_bytes`` and return where they begin."""
        sizes = [end - begin for begin, end in self.ranges]
        position = next(i for i, size in enumerate(sizes) if size >= num_bytes)
        begin, end = self.ranges.pop(position)
        if end - begin > num_bytes:
            self.ranges.insert(position, (begin + num_bytes, end))
        self.reached = max(self.reached, begin + num_bytes)
        return begin

    def give(self, begin: int, num_bytes: int) -> None:
        ranges, self.ranges = sorted([*self.ranges, (begin, begin + num_bytes)]), []
        for each in ranges:
            if self.ranges and self.ranges[-1][1] == each[0]:
                each = (self.ranges.pop()[0], each[1])
            self.ranges.append(each)
