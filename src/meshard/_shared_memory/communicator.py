"""Collectives between ranks of one host through shared memory.

A gather gives the slot itself, to which each rank has written its row. A reduce-scatter adds up
the rows of all ranks from where they were packed. Nothing goes through a socket, and no second
thread takes time from compute. Results are, bit for bit, those of the base class
``WorkCommunicator``. The base class still serves groups that cannot share memory, every all-to-all,
and all-reduces of more than two ranks: gloo adds those up in an order of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommSettings, Handle
from meshard._comm.cpu import WorkCommunicator, sum_rows
from meshard._shared_memory.ring import WHY_UNSUPPORTED, Ring, SlotHandle, open_ring
from meshard._torch.private import backend_name

_VARIABLE = "MESHARD_SHARED_MEMORY"


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
        return f"{sent.numel()} x {sent.dtype}\n{op} of unit {label[-100:]!r} ({root})"

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
        collective = "all_gather", label
        return SlotHandle(ring, collective, self._name(*collective, group, source), slot)

    def _start_reduce_scatter(
        self, rows: torch.Tensor, sum_dtype: torch.dtype, group: dist.ProcessGroup, label: str
    ) -> Handle:
        ring = self._ring(group)
        if ring is None:
            return super()._start_reduce_scatter(rows, sum_dtype, group, label)
        total = rows.new_empty(rows.size(1), dtype=sum_dtype)
        rank, slot = ring.rank, ring.take((group.size(), *rows.shape), rows.dtype)
        _write(slot[rank], rows)
        collective = "reduce_scatter", label
        name = self._name(*collective, group, rows)
        return SlotHandle(ring, collective, name, total, lambda: sum_rows(total, slot[:, rank]))

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        ring = self._ring(group) if group.size() == 2 else None
        if ring is None:
            return super()._start_all_reduce(buffer, group, label)
        slot = ring.take((2, *buffer.shape), buffer.dtype)
        _write(slot[ring.rank], buffer)
        collective = "all_reduce", label
        name = self._name(*collective, group, buffer)

        def add() -> None:
            torch.add(slot[0], slot[1], out=buffer)

        return SlotHandle(ring, collective, name, buffer, add)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source``, unless it was written to ``target`` already."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
