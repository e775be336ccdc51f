"""Use ``run_threads`` instead; this is the process group that its ranks have, and where they meet.

A collective is a ``Slot``. Every rank puts its tensors in, and takes its results out when it
waits. Both happen as late as a real backend may do it: inputs are read when the first rank waits
and all have come, outputs are written when their own rank waits. So code that frees or overwrites
an input before it waited, or reads an output too early, computes something else and is found out.
torch's threaded group blocks inside the call, so it can show neither a late wait nor a deadlock.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "threaded"
Tensors = list[torch.Tensor]
Compute = Callable[
    [list[Tensors]], Iterable[Sequence[torch.Tensor]]
]  # from the inputs by rank, to outputs


class RankStoppedError(BaseException):
    """Another rank failed. Not an ``Exception``, so that no code under test swallows it."""


class DeadlockError(RuntimeError):
    """Every rank has returned or waits for a rank that will never come."""


@dataclass(kw_only=True)
class Slot:
    """One collective of one group, from the first arrival to the last rank's wait."""

    label: str
    signature: tuple[object, ...]  # must be the same on all ranks
    compute: Compute
    ranks: tuple[int, ...]  # global
    parts: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)  # inputs and outputs
    results: dict[int, Tensors] | None = None
    first_rank: int = -1

    @property
    def is_full(self) -> bool:
        return len(self.parts) == len(self.ranks)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.parts]

    def fill_results(self) -> None:
        parts = [self.parts[rank] for rank in self.ranks]
        for rank, (inputs, outputs) in zip(self.ranks, parts, strict=True):
            for tensor in inputs + outputs:
                end = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
                if tensor.numel() and tensor.untyped_storage().nbytes() < end:
                    text = f"the storage of a tensor of rank {rank} was freed before"
                    raise RuntimeError(f"{text} {self.label} was waited for.")
        with torch.no_grad():
            results = self.compute([[each.clone() for each in inputs] for inputs, _ in parts])
        self.results = dict(zip(self.ranks, results, strict=True))


class Rendezvous:
    """The meeting place of all ranks of one ``run_threads`` call."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self._num_ranks, self._timeout = num_ranks, timeout
        self._deadline = time.monotonic() + timeout
        self._changed = threading.Condition()
        self._slots: dict[tuple[str, int], Slot] = {}
        self._waiting: dict[int, Slot] = {}
        self._finished: set[int] = set()
        self.not_waited: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
        self._is_stopped = False

    def arrive(self, key: tuple[str, int], slot: Slot, rank: int, part: tuple) -> Slot:
        """Bring ``part`` to the collective ``key``; ``slot`` is used if ``rank`` is the first."""
        with self._changed:
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
            self.not_waited[rank].append(found.label)
            if found.is_full:
                del self._slots[key]
                for waiter in [r for r, waits_for in self._waiting.items() if waits_for is found]:
                    del self._waiting[waiter]
                self._changed.notify_all()
            return found

    def collect(self, slot: Slot, rank: int) -> None:
        """Wait until all ranks have come to ``slot``, then write this rank's outputs."""
        with self._changed:
            self._raise_if_stopped()
            if not slot.is_full:
                self._waiting[rank] = slot
                self._raise_if_deadlocked()
            while not slot.is_full:
                if not self._changed.wait(max(0.0, self._deadline - time.monotonic())):
                    raise TimeoutError(
                        f"after {self._timeout:g} s rank {rank} still waits in {slot.label} "
                        f"for ranks {slot.missing()}."
                    )
                self._raise_if_stopped()
            if slot.results is None:
                slot.fill_results()
            self.not_waited[rank].remove(slot.label)
            (_, outputs), values = slot.parts[rank], slot.results.pop(rank)
        # `.data`: like a backend in C++, do not bump the version counter that autograd checks.
        for output, value in zip(outputs, values, strict=True):
            assert output.dtype == value.dtype, (
                f"{slot.label} wrote {value.dtype} to {output.dtype}"
            )
            output.data.copy_(value.view(output.shape))

    def is_ready(self, slot: Slot) -> bool:
        self._raise_if_stopped()
        return slot.is_full

    def finish(self, rank: int) -> None:
        """``rank`` has returned and will come to no other collective."""
        with self._changed:
            self._finished.add(rank)
            self._raise_if_deadlocked()

    def stop(self) -> None:
        """Wake every waiting rank with ``RankStoppedError``."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

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


_here = threading.local()  # .rendezvous, .rank: set by run_threads in each thread


def enter_thread(rendezvous: Rendezvous, rank: int) -> None:
    """Say which rank the calling thread is; groups created by it from now on use this."""
    _here.rendezvous, _here.rank = rendezvous, rank


class ThreadWork(dist.Work):
    """A collective that was started; nothing is written before it is waited for."""

    def __init__(self, rendezvous: Rendezvous, slot: Slot, rank: int) -> None:
        super().__init__()
        self._rendezvous, self._rank = rendezvous, rank
        self._slot: Slot | None = slot
        self._outputs = slot.parts[rank][1]

    def wait(self, timeout: object = None) -> bool:
        if self._slot is not None:
            self._rendezvous.collect(self._slot, self._rank)
            self._slot = None
        return True

    def is_completed(self) -> bool:
        return self._slot is None or (self._rendezvous.is_ready(self._slot) and self.wait())

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class LocalGroup(dist.ProcessGroup):
    """A process group without a network: what torch asks of a group that is made in Python."""

    backend = ""

    def __init__(self, name: str, group_rank: int, size: int) -> None:
        super().__init__(group_rank, size)
        self._name, self._group_rank, self._size = name, group_rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._group_rank

    def getBackendName(self) -> str:
        return self.backend

    @property
    def pg_name(self) -> str:
        return self._name

    group_name = pg_name

    def shutdown(self) -> None:
        """Nothing to give back."""

    abort = shutdown


def _poison(inputs: Tensors, outputs: Tensors) -> None:
    """Make outputs unusable until they are written, where they are not inputs as well."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for tensor in outputs:
        if tensor.untyped_storage().data_ptr() in taken or not tensor.numel():
            continue
        is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        tensor.data.fill_(float("nan") if is_real else 1 if tensor.dtype == torch.bool else 77)


def _shape_of(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    return tuple((str(tensor.dtype), tensor.numel()) for tensor in tensors)


def _fold(op: Callable[..., torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    return functools.partial(functools.reduce, op)  # rank by rank, in the dtype that was sent


_REDUCE = {
    dist.ReduceOp.SUM: _fold(torch.add),
    dist.ReduceOp.AVG: lambda tensors: _fold(torch.add)(tensors) / len(tensors),  # as gloo does
    dist.ReduceOp.PRODUCT: _fold(torch.mul),
    dist.ReduceOp.MIN: _fold(torch.minimum),
    dist.ReduceOp.MAX: _fold(torch.maximum),
}


def _op_of(opts: object) -> dist.ReduceOp.RedOpType:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    return getattr(op, "op", op)


class ThreadGroup(LocalGroup):
    """A process group among threads: one object per rank, met through one rendezvous."""

    backend = BACKEND

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int) -> None:
        super().__init__(name, group_rank, len(ranks))
        self._ranks = ranks
        self._rendezvous: Rendezvous = _here.rendezvous
        self._count = itertools.count()

    def _start(
        self, kind: str, inputs: Tensors, outputs: Tensors, compute: Compute, *same: object
    ) -> ThreadWork:
        number, rank = next(self._count), self._ranks[self._group_rank]
        slot = Slot(
            label=f"{kind} #{number} of group {self._name!r} {list(self._ranks)}",
            signature=(kind, *same),
            compute=compute,
            ranks=self._ranks,
        )
        _poison(inputs, outputs)
        key = f"{self._name}:{self._ranks}", number
        slot = self._rendezvous.arrive(key, slot, rank, (inputs, outputs))
        return ThreadWork(self._rendezvous, slot, rank)

    def _cut(self, kind: str, long: Tensors, short: Tensors) -> Tensors:
        """Cut each long tensor to as many pieces of the length of a short one as there are ranks.

        What is written to the pieces is written to the tensors.
        """
        for one, other in zip(long, short, strict=True):
            if one.numel() != other.numel() * self.size() or one.dtype != other.dtype:
                raise ValueError(
                    f"{kind} over {self.size()} ranks needs {_shape_of([other])} times the number "
                    f"of ranks, got {_shape_of([one])} (dtype, elements)."
                )
        pairs = zip(long, short, strict=True)
        rows = [one.detach().view(-1).split([each.numel()] * self.size()) for one, each in pairs]
        return list(itertools.chain(*rows))

    def allreduce(self, tensors: Tensors, opts: object = None) -> ThreadWork:
        fold = _REDUCE[op := _op_of(opts)]

        def compute(inputs):
            return [[fold(same) for same in zip(*inputs, strict=True)]] * len(inputs)

        return self._start("all_reduce", tensors, tensors, compute, str(op), _shape_of(tensors))

    allreduce_coalesced = allreduce

    def barrier(self, opts: object = None) -> ThreadWork:
        return self._start("barrier", [], [], lambda inputs: inputs)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: object = None) -> ThreadWork:
        def compute(inputs):
            return [list(itertools.chain(*zip(*inputs, strict=True)))] * len(inputs)

        flat = list(itertools.chain(*outputs))
        return self._start("all_gather", inputs, flat, compute, _shape_of(inputs))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> ThreadWork:
        return self.allgather([self._cut("all_gather", outputs, inputs)], inputs)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> ThreadWork:
        return self.all_gather_single_coalesced([output], [input])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> ThreadWork:
        fold, size = _REDUCE[op := _op_of(opts)], self.size()

        def compute(inputs):
            totals = [fold(same) for same in zip(*inputs, strict=True)]
            return [totals[rank::size] for rank in range(size)]

        cut = self._cut("reduce_scatter", inputs, outputs)
        return self._start("reduce_scatter", cut, outputs, compute, str(op), _shape_of(inputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> ThreadWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: object = None,
    ) -> ThreadWork:
        def cut(tensor: torch.Tensor, splits: Sequence[int]) -> Tensors:
            even = [tensor.size(0) // self.size()] * self.size()
            return list(tensor.detach().split(splits or even))

        sent, received = cut(input, input_splits), cut(output, output_splits)
        return self._start("all_to_all", sent, received, lambda inputs: zip(*inputs, strict=True))

    def broadcast(self, tensors: Tensors, opts: Any) -> ThreadWork:
        root = opts.rootRank

        def compute(inputs):
            return [inputs[root]] * len(inputs)

        return self._start("broadcast", tensors, tensors, compute, root, _shape_of(tensors))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> ThreadWork:
        root = opts.rootRank

        def compute(inputs):
            gathered = list(itertools.chain(*inputs))
            return [gathered if rank == root else [] for rank in range(len(inputs))]

        return self._start("gather", inputs, outputs[0] if outputs else [], compute, root)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> ThreadWork:
        root = opts.rootRank

        def compute(inputs):
            return [[each] for each in inputs[root]]

        return self._start("scatter", inputs[0] if inputs else [], outputs, compute, root)

    # The names that torch 2.11 and 2.12 call.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def create(options: Any, _: object) -> ThreadGroup:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return ThreadGroup(options.group_id, ranks, options.group_rank)
