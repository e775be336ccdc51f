"""The memory of a planned step: when each storage is made and freed, and what it is for."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from meshard._torch.private import graph_task_id

KINDS = ("params", "grads", "optimizer", "unsharded", "activations", "communication")


@dataclass(slots=True, eq=False)
class Allocation:
    """One storage."""

    address: int
    capacity: int  # bytes when it was made
    num_bytes: int  # at present
    kind: str
    unit: str  # that ran, or that was gathered, when the storage was made
    is_on_host: bool = False  # of a rank that computes on a device


@dataclass(frozen=True, slots=True)
class Change:
    """A storage was made, resized or freed."""

    allocation: Allocation
    num_bytes: int  # more than before, or less
    moment: int  # an index of ``MemoryLog.moments``


class Moment(NamedTuple):
    """A part of a step."""

    phase: str  # "set-up", "forward", "backward", "optimizer" or "after step"
    unit: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes alive at one time, on the device (if there is none, on the host)."""

    moment: int  # an index of ``MemoryLog.moments``
    number: int  # of the change after which this is
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.by_kind.values())


_IN_BACKWARD = Moment("backward", "")

_address_of = operator.attrgetter("address")
_total_of = operator.attrgetter("total")
_nbytes = torch.UntypedStorage.nbytes  # a plan replaces it by ``MemoryLog.size_of``


class MemoryLog:
    """Records every storage while a job runs on phantom tensors.

    What a storage is for is mostly known when it is made: a tensor made in forward is an
    activation, and one that autograd makes in backward is a gradient. ``relabel`` corrects that
    for the storages of parameters, gradients and states.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.moments: list[Moment] = [Moment("set-up", "")]
        self.step_begins: list[int] = []  # indices of ``changes``
        self._kind: str | None = None  # of what is made now; None: by the phase
        self._unit: str | None = None  # for which it is made; None: the one that runs
        self._is_on_host = False
        self._gathered: list[Allocation] = []  # resized since the last unit was gathered
        self._sent: list[Allocation] = []  # for communication, since the last reduction began
        self._unnamed: list[Allocation] = []  # made in a backward, of which unit is not known yet
        self._alive: dict[int, Allocation] = {}  # by the id of the C++ storage
        self._by_address: list[Allocation] | None = None  # those alive; None: not sorted since
        self._resized: dict[int, int] = {}
        self._watches: set[Any] = set()  # weak references, which call back if they live

    # --- what happens ----------------------------------------------------------------------

    def add(self, storage: torch.UntypedStorage) -> None:
        """Record a new storage."""
        key, num_bytes = storage._cdata, _nbytes(storage)
        if graph_task_id() != -1 and self.moments[-1].phase == "forward":
            self.enter("backward", "")
        unit = self.moments[-1].unit if self._unit is None else self._unit
        allocation = Allocation(
            storage.data_ptr(), num_bytes, num_bytes, self._present_kind(), unit, self._is_on_host
        )
        self._alive[key], self._by_address = allocation, None
        if self._kind == "communication" and self._unit is None:
            self._sent.append(allocation)
        if self.moments[-1] == _IN_BACKWARD:
            self._unnamed.append(allocation)
        self._change(allocation, num_bytes)

        def freed(watch: Any) -> None:
            self._watches.discard(watch)
            self._resized.pop(key, None)
            if self._alive.get(key) is allocation:
                del self._alive[key]
                self._by_address = None
            self._change(allocation, -allocation.num_bytes)

        self._watches.add(weakref.ref(storage, freed))

    def add_workspace(self) -> int:
        """Record that a kernel runs; return the number by which ``fill_workspace`` knows it."""
        allocation = Allocation(0, 0, 0, self._present_kind(), self.moments[-1].unit)
        self.changes += [Change(allocation, 0, len(self.moments) - 1)] * 2
        return len(self.changes) - 2

    def fill_workspace(self, number: int, num_bytes: int) -> None:
        """Record how much memory a kernel has had while it ran."""
        for at, change in ((number, num_bytes), (number + 1, -num_bytes)):
            self.changes[at] = replace(self.changes[at], num_bytes=change)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        """Record that a storage has another size from now on, and return it."""
        allocation = self._alive.get(storage._cdata)
        if allocation is not None:
            allocation.kind = "unsharded"  # meshard resizes nothing else
            self._gathered.append(allocation)
            self._resized[storage._cdata] = num_bytes
            before, allocation.num_bytes = allocation.num_bytes, num_bytes
            self._change(allocation, num_bytes - before)
        return storage

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Return the size of a storage, as it was recorded if it was resized."""
        size = self._resized.get(storage._cdata)
        return _nbytes(storage) if size is None else size

    def enter(self, phase: str, unit: str) -> None:
        """Record that another part of the step begins."""
        moment = Moment(phase, unit)
        if moment != self.moments[-1]:
            self.moments.append(moment)

    def gathered(self, unit: str) -> None:
        """Record that what was resized last are the unsharded parameters of ``unit``."""
        for allocation in self._gathered:
            allocation.unit = unit
        self._gathered.clear()
        self._sent.clear()

    def reduced(self, unit: str) -> None:
        """Record that a backward has computed all gradients of ``unit``.

        A unit that was not resharded is not gathered in backward, so its backward is known by its
        end only.
        """
        for allocation in self._sent:
            allocation.unit = unit
        self._sent.clear()
        if self.moments[-1] == _IN_BACKWARD:
            self.moments[-1] = Moment("backward", unit)
            for allocation in self._unnamed:
                allocation.unit = unit
            self.enter("backward", "")
        self._unnamed.clear()

    def begin_step(self) -> None:
        """Record that a step begins."""
        self.step_begins.append(len(self.changes))
        self.enter("forward", "")

    @contextlib.contextmanager
    def making(
        self, kind: str, *, unit: str | None = None, is_on_host: bool = False
    ) -> Iterator[None]:
        """Record what is made inside as ``kind``; ``unit`` None: for the unit that runs."""
        before = self._kind, self._unit, self._is_on_host
        self._kind, self._unit, self._is_on_host = kind, unit, is_on_host
        try:
            yield
        finally:
            self._kind, self._unit, self._is_on_host = before

    def relabel(
        self,
        tensors: Iterable[torch.Tensor],
        kind: str,
        *,
        unit: str | None = None,
        is_on_host: bool = False,
    ) -> None:
        """Correct what the storages of ``tensors`` are for, and whose they are."""
        for found in self._allocations_of(tensors):
            if found is not None:
                found.kind, found.is_on_host = kind, is_on_host
                if unit is not None:
                    found.unit = unit

    def knows(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the storages of all ``tensors`` were made while the log was kept."""
        return None not in self._allocations_of(tensors)

    def _allocations_of(self, tensors: Iterable[torch.Tensor]) -> Iterator[Allocation | None]:
        for tensor in tensors:
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            found = self._alive.get(storage._cdata)
            if found is None and storage.nbytes():
                # A flat shard has one storage, and its parts appear as storages inside of it.
                if self._by_address is None:
                    self._by_address = sorted(self._alive.values(), key=_address_of)
                alive, address = self._by_address, storage.data_ptr()
                position = bisect.bisect_right(alive, address, key=_address_of) - 1
                around = alive[position] if position >= 0 else None
                if around is not None and address < around.address + around.capacity:
                    found = around
            if found is not None or storage.nbytes():
                yield found

    def _present_kind(self) -> str:
        if self._kind is not None:
            return self._kind
        is_backward = graph_task_id() != -1 and not torch.is_grad_enabled()
        return "grads" if is_backward else "activations"

    def _change(self, allocation: Allocation, num_bytes: int) -> None:
        if num_bytes:
            self.changes.append(Change(allocation, num_bytes, len(self.moments) - 1))

    # --- what it comes to ------------------------------------------------------------------

    def history(self, step: int) -> Iterator[Usage]:
        """Iterate over the memory after each change in a step, and at its beginning.

        Step -1 is the making of the job.
        """
        ends = [0, *self.step_begins, len(self.changes)]
        by_kind = dict.fromkeys(KINDS, 0)
        for number, change in enumerate(self.changes[: ends[step + 2]]):
            if not change.allocation.is_on_host:
                by_kind[change.allocation.kind] += change.num_bytes
            if number >= ends[step + 1] - 1:
                yield Usage(change.moment, number, dict(by_kind))

    def most_in(self, step: int) -> Usage:
        """Return the first usage of a step that no other one of it exceeds."""
        return max(self.history(step), key=_total_of, default=Usage(0, 0, {}))

    def parts_of_last_step(self) -> Iterator[tuple[Moment, Usage]]:
        """Iterate over its moments in order, each with the most that is alive in it."""
        usages = self.history(len(self.step_begins) - 1)
        for moment, some in itertools.groupby(usages, operator.attrgetter("moment")):
            yield self.moments[moment], max(some, key=_total_of)

    def host_peak(self) -> int:
        """Return the most bytes that were alive in host memory of a rank with a device."""
        on_host = (c.num_bytes if c.allocation.is_on_host else 0 for c in self.changes)
        return max(itertools.accumulate(on_host), default=0)

    def units_at(self, number: int) -> Mapping[str, dict[str, int]]:
        """Return bytes by unit and kind after the change of this number."""
        by_unit = defaultdict[str, dict[str, int]](lambda: dict.fromkeys(KINDS, 0))
        for change in self.changes[: number + 1]:
            allocation = change.allocation
            if not allocation.is_on_host:
                by_unit[allocation.unit][allocation.kind] += change.num_bytes
        return by_unit
