"""A process group whose ranks are threads of this process.

Ours instead of torch's threaded group: that one blocks inside the call, so it can show neither a
late wait nor a deadlock, and its all-to-all and reductions do not check sizes or dtypes.
"""

import itertools
import threading
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from tests.support import thread_math as math
from tests.support.rendezvous import Compute, Part, Rendezvous, Slot
from tests.support.torch_testing import LocalGroup, take_threaded_backend

BACKEND = "threaded"

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
        self._outputs = slot.parts[rank].outputs

    def wait(self, timeout: object = None) -> bool:
        if self._slot is not None:
            self._rendezvous.collect(self._slot, self._rank)
            self._slot = None
        return True

    def is_completed(self) -> bool:
        return self._slot is None or (self._rendezvous.is_ready(self._slot) and self.wait())

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def _poison(part: Part) -> None:
    """Make outputs unusable until they are written, where they are not inputs as well."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in part.inputs}
    for tensor in part.outputs:
        if tensor.untyped_storage().data_ptr() in taken or not tensor.numel():
            continue
        is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        tensor.data.fill_(float("nan") if is_real else 1 if tensor.dtype == torch.bool else 77)


def _shape_of(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    return tuple((str(tensor.dtype), tensor.numel()) for tensor in tensors)


class ThreadGroup(LocalGroup):
    """A process group among threads: one object per rank, met through one rendezvous."""

    backend = BACKEND

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int) -> None:
        super().__init__(name, group_rank, len(ranks))
        self._ranks = ranks
        self._rendezvous: Rendezvous = _here.rendezvous
        self._count = itertools.count()

    def __repr__(self) -> str:
        return f"ThreadGroup({self._name!r}, ranks {self._ranks}, rank {self._group_rank})"

    def _start(
        self, kind: str, part: Part, compute: Compute, *, same: tuple[object, ...]
    ) -> ThreadWork:
        number, rank = next(self._count), self._ranks[self._group_rank]
        key = f"{self._name}:{self._ranks}"
        slot = Slot(
            label=f"{kind} #{number} of group {self._name!r} {list(self._ranks)}",
            signature=(kind, *same),
            compute=compute,
            ranks=self._ranks,
            changed=self._rendezvous.new_condition(),
        )
        _poison(part)
        return ThreadWork(
            self._rendezvous,
            self._rendezvous.arrive((key, number), slot, rank, part),
            rank,
        )

    def _need(self, ok: bool, kind: str, inputs: object, outputs: object) -> None:
        if not ok:
            raise ValueError(
                f"{kind} over {self.size()} ranks cannot turn {inputs} into {outputs} "
                "(dtype, elements)."
            )

    def _check_ratio(
        self, kind: str, ins: list[torch.Tensor], outs: list[torch.Tensor], up: bool
    ) -> None:
        for one, other in zip(ins, outs, strict=True):
            small, large = (one, other) if up else (other, one)
            fits = small.numel() * self.size() == large.numel() and one.dtype == other.dtype
            self._need(fits, kind, _shape_of([one]), _shape_of([other]))

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> ThreadWork:
        op = math.op_of(opts)
        part = Part(inputs=tensors, outputs=tensors)
        same = (str(op), _shape_of(tensors))
        return self._start("all_reduce", part, partial(math.all_reduce, op=op), same=same)

    allreduce_coalesced = allreduce

    def barrier(self, opts: object = None) -> ThreadWork:
        return self._start(
            "barrier", Part(inputs=[], outputs=[]), lambda parts: [[] for _ in parts], same=()
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None
    ) -> ThreadWork:
        self._check_ratio("all_gather", inputs, outputs, True)
        part = Part(inputs=inputs, outputs=outputs)
        return self._start("all_gather", part, math.all_gather_single, same=_shape_of(inputs))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> ThreadWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None
    ) -> ThreadWork:
        part = Part(inputs=inputs, outputs=outputs[0])
        return self._start("all_gather_list", part, math.all_gather_list, same=())

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None
    ) -> ThreadWork:
        op = math.op_of(opts)
        self._check_ratio("reduce_scatter", inputs, outputs, False)
        part = Part(inputs=inputs, outputs=outputs)
        same = (str(op), _shape_of(inputs))
        return self._start("reduce_scatter", part, partial(math.reduce_scatter, op=op), same=same)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> ThreadWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: object = None
    ) -> ThreadWork:
        op = math.op_of(opts)
        part = Part(inputs=inputs[0], outputs=outputs)
        compute = partial(math.reduce_scatter_list, op=op)
        return self._start("reduce_scatter_list", part, compute, same=(str(op),))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: object = None,
    ) -> ThreadWork:
        received = output_splits or [output.size(0) // self.size()] * self.size()
        sent = input_splits or [input.size(0) // self.size()] * self.size()
        fits = sum(received) == output.size(0) and sum(sent) == input.size(0)
        fits = fits and output.dtype == input.dtype
        self._need(fits, "all_to_all", _shape_of([input]), _shape_of([output]))
        part = Part(inputs=[input], outputs=[output], splits=(received, sent))
        return self._start("all_to_all", part, math.all_to_all_single, same=(str(input.dtype),))

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None
    ) -> ThreadWork:
        part = Part(inputs=inputs, outputs=outputs)
        return self._start("all_to_all_list", part, math.all_to_all_list, same=())

    def broadcast(self, tensors: list[torch.Tensor], opts: object = None) -> ThreadWork:
        root = getattr(opts, "rootRank", 0)
        part = Part(inputs=tensors, outputs=tensors)
        same = (root, _shape_of(tensors))
        return self._start("broadcast", part, partial(math.broadcast, root=root), same=same)

    def reduce(self, tensors: list[torch.Tensor], opts: object = None) -> ThreadWork:
        op, root = math.op_of(opts), getattr(opts, "rootRank", 0)
        part = Part(inputs=tensors, outputs=tensors if self._group_rank == root else [])
        same = (str(op), root, _shape_of(tensors))
        return self._start("reduce", part, partial(math.reduce, op=op, root=root), same=same)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None
    ) -> ThreadWork:
        root = getattr(opts, "rootRank", 0)
        part = Part(inputs=inputs, outputs=outputs[0] if outputs else [])
        return self._start("gather", part, partial(math.gather, root=root), same=(root,))

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: object = None
    ) -> ThreadWork:
        root = getattr(opts, "rootRank", 0)
        part = Part(inputs=inputs[0] if inputs else [], outputs=outputs)
        return self._start("scatter", part, partial(math.scatter, root=root), same=(root,))

    # The names that torch 2.11 and 2.12 call.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _create(options: object, _backend_options: object) -> ThreadGroup:
    size = options.group_size  # type: ignore[attr-defined]  # torch gives this type no stub
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))  # type: ignore[attr-defined]
    return ThreadGroup(options.group_id, ranks, options.group_rank)  # type: ignore[attr-defined]


take_threaded_backend(_create)
