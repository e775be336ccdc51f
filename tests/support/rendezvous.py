"""A meeting of threads in a collective, which detects deadlocks.

A collective is a :class:`Slot`. Every rank puts its tensors in, and takes its results out when it
waits. Both happen as late as a real backend may do it: inputs are read when the first rank waits
and all have come, outputs are written when their own rank waits. So code that frees or overwrites
an input before it waited, or reads an output too early, computes something else and is found out.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Compute = Callable[[Sequence["Part"]], list[list[torch.Tensor]]]


class RankStoppedError(BaseException):
    """Another rank failed. Not an ``Exception``, so that no code under test swallows it."""


class DeadlockError(RuntimeError):
    """Every rank has returned or waits for a rank that will never come."""


@dataclass(kw_only=True)
class Part:
    """What one rank brings to a collective."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    splits: tuple[list[int], list[int]] | None = None


@dataclass(kw_only=True)
class Slot:
    """One collective of one group, from the first arrival to the last rank's wait."""

    label: str
    signature: tuple[object, ...]
    compute: Compute
    ranks: tuple[int, ...]  # global
    changed: threading.Condition
    parts: dict[int, Part] = field(default_factory=dict)  # by global rank
    results: dict[int, list[torch.Tensor]] | None = None
    first_rank: int = -1

    @property
    def is_full(self) -> bool:
        return len(self.parts) == len(self.ranks)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.parts]


class Rendezvous:
    """The meeting place of all ranks of one ``run_threads`` call."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self._num_ranks = num_ranks
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._lock = threading.RLock()
        self._slots: dict[tuple[str, int], Slot] = {}
        self._waiting: dict[int, Slot] = {}
        self._finished: set[int] = set()
        self._not_waited: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
        self._is_stopped = False

    def arrive(self, key: tuple[str, int], slot: Slot, rank: int, part: Part) -> Slot:
        """Bring ``part`` to the collective ``key``; ``slot`` is used if ``rank`` is the first."""
        with self._lock:
            self._raise_if_stopped()
            found = self._slots.setdefault(key, slot)
            if found is slot:
                slot.first_rank = rank
            elif found.signature != slot.signature:
                raise RuntimeError(
                    f"rank {rank} calls {slot.label} {slot.signature[1:]} where "
                    f"rank {found.first_rank} calls {found.label} {found.signature[1:]}."
                )
            found.parts[rank] = part
            self._not_waited[rank].append(found.label)
            if found.is_full:
                del self._slots[key]
                for waiter in [r for r, waits_for in self._waiting.items() if waits_for is found]:
                    del self._waiting[waiter]
                found.changed.notify_all()
            return found

    def new_condition(self) -> threading.Condition:
        return threading.Condition(self._lock)

    def collect(self, slot: Slot, rank: int) -> None:
        """Wait until all ranks have come to ``slot``, then write this rank's outputs."""
        with self._lock:
            self._raise_if_stopped()
            if not slot.is_full:
                self._waiting[rank] = slot
                self._raise_if_deadlocked()
            while not slot.is_full:
                if not slot.changed.wait(max(0.0, self._deadline - time.monotonic())):
                    raise TimeoutError(
                        f"after {self._timeout:g} s rank {rank} still waits in {slot.label} "
                        f"for ranks {slot.missing()}."
                    )
                self._raise_if_stopped()
            if slot.results is None:
                parts = [slot.parts[member] for member in slot.ranks]
                _check_alive(slot, parts)
                with torch.no_grad():
                    results = slot.compute(parts)
                slot.results = dict(zip(slot.ranks, results, strict=True))
            self._not_waited[rank].remove(slot.label)
            part, values = slot.parts[rank], slot.results.pop(rank)
        # `.data`: like a backend in C++, do not bump the version counter that autograd checks.
        for output, value in zip(part.outputs, values, strict=True):
            output.data.copy_(value.view(output.shape))

    def is_ready(self, slot: Slot) -> bool:
        with self._lock:
            self._raise_if_stopped()
            return slot.is_full

    def finish(self, rank: int) -> None:
        """``rank`` has returned and will come to no other collective."""
        with self._lock:
            self._finished.add(rank)
            self._raise_if_deadlocked()

    def stop(self) -> None:
        """Wake every waiting rank with :class:`RankStoppedError`."""
        with self._lock:
            self._is_stopped = True
            for slot in {id(slot): slot for slot in self._waiting.values()}.values():
                slot.changed.notify_all()

    def not_waited(self) -> dict[int, list[str]]:
        """Return, per rank, the collectives that it started and never waited for."""
        return {rank: labels for rank, labels in self._not_waited.items() if labels}

    def _raise_if_stopped(self) -> None:
        if self._is_stopped:
            raise RankStoppedError

    def _raise_if_deadlocked(self) -> None:
        if not self._waiting or len(self._waiting) + len(self._finished) < self._num_ranks:
            return
        lines = [
            f"rank {rank} waits in {slot.label} for ranks {slot.missing()}"
            for rank, slot in sorted(self._waiting.items())
        ]
        lines += [f"rank {rank} has returned" for rank in sorted(self._finished)]
        raise DeadlockError("deadlock: " + "; ".join(lines) + ".")


def _check_alive(slot: Slot, parts: Sequence[Part]) -> None:
    for rank, part in zip(slot.ranks, parts, strict=True):
        for tensor in part.inputs + part.outputs:
            end = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
            if tensor.numel() and tensor.untyped_storage().nbytes() < end:
                raise RuntimeError(
                    f"the storage of a tensor of rank {rank} was freed before "
                    f"{slot.label} was waited for."
                )
