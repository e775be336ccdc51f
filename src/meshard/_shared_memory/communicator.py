"""Collectives between ranks of one host through shared memory.

A gather gives the slot itself, to which each rank has written its row. A reduce-scatter adds up
the rows of all ranks from where they were packed. Nothing goes through a socket, and no second
thread takes time from compute. Results are, bit for bit, those of the base class
``WorkCommunicator``. The base class still serves groups that cannot share memory, every all-to-all,
and all-reduces of more than two ranks: gloo adds those up in an order of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from meshard._comm import spans
from meshard._comm.communicator import CommSettings, Handle
from meshard._comm.cpu import WorkCommunicator, sum_rows
from meshard._shared_memory.ring import WHY_UNSUPPORTED, Ring, open_ring
from meshard._torch.private import backend_name

_VARIABLE = "MESHARD_SHARED_MEMORY"


class SlotHandle:
    """A collective in which this rank reads what the others have written to a slot.

    ``then`` computes the result from the slot; None: the slot is the result. It must not refer to
    this object, as such a cycle would delay ``__del__``.
    """

    def __init__(
        self, ring: Ring, name: str, result: torch.Tensor, then: Callable[[], object] | None = None
    ) -> None:
        self.result = result
        self._ring = ring
        self._then = then
        self._is_open = True  # until the slot is released
        self._issued = None if spans.recorder is None else spans.issued()
        if self._issued is not None:
            self._issued.ends_later()
        self._number = ring.publish(name, self)

    def wait(self) -> None:
        if not self._is_open:
            return
        began = time.monotonic()
        self._ring.wait(self._number)
        if self._then is not None:
            self._then()
        # The calling thread reads what others have published. A trace counts this as a wait.
        if self._issued is not None:
            self._issued.waited(began, time.monotonic())
        if self._then is not None:
            self.release()

    synchronize = wait

    def done(self) -> bool:
        return not self._is_open or self._ring.is_published(self._number)

    def release(self) -> None:
        if self._is_open:
            self._is_open, self._then = False, None
            self._ring.release(self._number)
            if self._issued is not None:
                self._issued.end()

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


def _is_candidate(group: dist.ProcessGroup) -> bool:
    # Not dist.get_backend, which is "undefined" if the group was made without naming a backend.
    return group.size() > 1 and backend_name(group, torch.device("cpu")) == "gloo"


class SharedMemoryCommunicator(WorkCommunicator):
    """Collectives through shared memory in groups whose ranks can share it, else through sockets.

    At the first collective of a group, its ranks find out whether they can share memory. If one of
    them had ``MESHARD_SHARED_MEMORY=0`` when its communicator was made, the group uses sockets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_wanted = os.environ.get(_VARIABLE, "1") != "0"
        # None if the group uses sockets. Copies of this communicator share the dict.
        self._rings: dict[dist.ProcessGroup, Ring | None] = {}

    def _ring(self, group: dist.ProcessGroup) -> Ring | None:
        """Return the ring of ``group``. **Collective:** the first call for each group."""
        if group not in self._rings:
            is_possible = _is_candidate(group)
            ring = open_ring(group, is_wanted=self._is_wanted) if is_possible else None
            self._rings[group] = ring
        return self._rings[group]

    def _ring_before(self, group: dist.ProcessGroup) -> Ring | None:
        """Return the ring of ``group``, to write to the slot of its next collective.

        Under ``MESHARD_DEBUG=1`` it opens no ring: opening is itself a collective, and the check
        that the ranks agree comes later, with the collective that uses the slot.
        """
        if self._custom != CommSettings():
            return None
        return self._rings.get(group) if self.is_checked else self._ring(group)

    def _name(self, op: str, label: str, group: dist.ProcessGroup, sent: torch.Tensor) -> str:
        root = self.root_names.get(group, "no root")
        # A ring keeps the beginning of a name, and units differ in the end of their label.
        return f"{op} of unit {label[-100:]!r} ({root})\n{sent.numel()} x {sent.dtype}"

    def memory_report(self, groups: Iterable[dist.ProcessGroup]) -> str:
        candidates = [group for group in dict.fromkeys(groups) if _is_candidate(group)]
        if not candidates:
            return ""
        if WHY_UNSUPPORTED or not self._is_wanted:
            return f"shared memory: off: {WHY_UNSUPPORTED or f'{_VARIABLE}=0'}"
        if any(group not in self._rings for group in candidates):
            return "shared memory: not known before the first step"
        num_open = sum(self._rings[group] is not None for group in candidates)
        if num_open == len(candidates):
            return "shared memory: on"
        where = f" in {len(candidates) - num_open} of {len(candidates)} groups" if num_open else ""
        return (
            f"shared memory: off{where}: the ranks are on several hosts, one may not open the "
            f"memory of another, or one has set {_VARIABLE}=0"
        )

    def gather_memory(
        self, numel: int, dtype: torch.dtype, *, device: torch.device, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ring = self._ring_before(group)
        if ring is None:
            return super().gather_memory(numel, dtype, device=device, group=group)
        return ring.take((group.size(), numel), dtype)

    def send_memory(
        self, numel: int, dtype: torch.dtype, *, device: torch.device, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ring = self._ring_before(group)
        if ring is None:
            return super().send_memory(numel, dtype, device=device, group=group)
        return ring.take((group.size(), group.size(), numel), dtype)[ring.rank]

    def _start_all_gather(
        self, memory: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        ring = self._ring(group)
        if ring is None:
            return super()._start_all_gather(memory, source, group, label)
        slot = ring.take(memory.shape, memory.dtype)
        _write(slot[ring.rank], source)
        return SlotHandle(ring, self._name("all_gather", label, group, source), slot)

    def _start_reduce_scatter(
        self, total: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        ring = self._ring(group)
        if ring is None:
            return super()._start_reduce_scatter(total, rows, group, label)
        rank, slot = ring.rank, ring.take((group.size(), *rows.shape), rows.dtype)
        _write(slot[rank], rows)
        name = self._name("reduce_scatter", label, group, rows)
        return SlotHandle(ring, name, total, lambda: sum_rows(total, slot[:, rank]))

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        ring = self._ring(group) if group.size() == 2 else None
        if ring is None:
            return super()._start_all_reduce(buffer, group, label)
        slot, other = ring.take((2, *buffer.shape), buffer.dtype), 1 - ring.rank
        _write(slot[ring.rank], buffer)
        name = self._name("all_reduce", label, group, buffer)
        return SlotHandle(ring, name, buffer, lambda: buffer.add_(slot[other]))


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source``, unless it was written to ``target`` already."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
