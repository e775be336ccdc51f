"""The result of each collective, given what every rank brings.

Each function takes the parts in rank order and returns, per rank, one value per output.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tests.support.rendezvous import Part


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor  # rank by rank, in the dtype that was sent
    return total


def _fold(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = op(total, tensor)
        return total

    return reduce


_REDUCE: dict[object, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    dist.ReduceOp.SUM: _sum,
    dist.ReduceOp.AVG: lambda tensors: _sum(tensors) / len(tensors),  # overflows as gloo does
    dist.ReduceOp.PRODUCT: _fold(torch.mul),
    dist.ReduceOp.MIN: _fold(torch.minimum),
    dist.ReduceOp.MAX: _fold(torch.maximum),
    dist.ReduceOp.BAND: _fold(torch.bitwise_and),
    dist.ReduceOp.BOR: _fold(torch.bitwise_or),
    dist.ReduceOp.BXOR: _fold(torch.bitwise_xor),
}


def op_of(opts: object) -> object:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    op = getattr(op, "op", op)
    if op not in _REDUCE:
        raise RuntimeError(f"Cannot use ReduceOp {op} among ranks that are threads.")
    return op


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def all_reduce(parts: Sequence[Part], op: object) -> list[list[torch.Tensor]]:
    totals = [_REDUCE[op](same) for same in zip(*(part.inputs for part in parts), strict=True)]
    return [totals for _ in parts]


def all_gather_single(parts: Sequence[Part]) -> list[list[torch.Tensor]]:
    columns = zip(*(part.inputs for part in parts), strict=True)
    whole = [torch.cat([_flat(tensor) for tensor in column]) for column in columns]
    return [whole for _ in parts]


def all_gather_list(parts: Sequence[Part]) -> list[list[torch.Tensor]]:
    gathered = [part.inputs[0].clone() for part in parts]
    return [gathered for _ in parts]


def reduce_scatter(parts: Sequence[Part], op: object) -> list[list[torch.Tensor]]:
    columns = zip(*(part.inputs for part in parts), strict=True)
    totals = [_REDUCE[op]([_flat(tensor) for tensor in column]) for column in columns]
    return [
        [total.chunk(len(parts))[rank] if total.numel() else total for total in totals]
        for rank in range(len(parts))
    ]


def reduce_scatter_list(parts: Sequence[Part], op: object) -> list[list[torch.Tensor]]:
    return [[_REDUCE[op]([part.inputs[rank] for part in parts])] for rank in range(len(parts))]


def all_to_all_single(parts: Sequence[Part]) -> list[list[torch.Tensor]]:
    pieces = []
    for part in parts:
        assert part.splits is not None
        pieces.append(part.inputs[0].detach().split(part.splits[1]))
    return [[torch.cat([sent[rank] for sent in pieces])] for rank in range(len(parts))]


def all_to_all_list(parts: Sequence[Part]) -> list[list[torch.Tensor]]:
    return [[part.inputs[rank].clone() for part in parts] for rank in range(len(parts))]


def broadcast(parts: Sequence[Part], root: int) -> list[list[torch.Tensor]]:
    values = [tensor.clone() for tensor in parts[root].inputs]
    return [values for _ in parts]


def reduce(parts: Sequence[Part], op: object, root: int) -> list[list[torch.Tensor]]:
    total = _REDUCE[op]([part.inputs[0] for part in parts])
    return [[total] if rank == root else [] for rank in range(len(parts))]


def gather(parts: Sequence[Part], root: int) -> list[list[torch.Tensor]]:
    gathered = [part.inputs[0].clone() for part in parts]
    return [gathered if rank == root else [] for rank in range(len(parts))]


def scatter(parts: Sequence[Part], root: int) -> list[list[torch.Tensor]]:
    return [[tensor.clone()] for tensor in parts[root].inputs]
