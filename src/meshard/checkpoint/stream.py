"""Weights out of a sharded module: tensor after tensor, or as a table of who holds what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from meshard._mesh.boxes import coordinates
from meshard.checkpoint.weights_gather import (
    Agreement,
    Intent,
    Packed,
    batches,
    check_dtype,
    gather,
    pack,
    readable_weights,
)
from meshard.checkpoint.weights_layout import (
    Weight,
    meshes_of,
    own_rank,
    ranks_of_meshes,
    weights_of,
    without_wrappers,
)

# --- stream_unsharded ------------------------------------------------------------------------

_CALLER = "stream_unsharded"


def stream_unsharded(
    module: nn.Module,
    *,
    rank0_only: bool = False,
    dtype: torch.dtype | None = None,
    max_bytes: int = 64 * 2**20,
) -> WeightStream:
    """Iterate over ``(name, unsharded tensor)`` of all weights of ``module``, some at a time.

    Names, their order and what has them are those of ``module.state_dict()``: parameters and
    persistent buffers; of a module in ``torch.compile``, DDP or ``AveragedModel``, those of the
    inner one. A tied parameter comes under each of its names. Every tensor is new memory, yours to
    keep and to edit, on the device of the mesh, or, of what a rank holds whole, where that is. The
    module stays as it is: units stay sharded, and no hook of a forward runs. Do not edit weights
    before the end.

    **Collective:** every rank of the module's meshes calls and iterates, also with ``rank0_only``,
    where the other ranks' loops have no items. Ranks may take any time in between; the others wait
    for the timeout of the process group at most.

    **Stopping early.** A loop that is left by ``break`` or by an exception closes the stream, and
    the other ranks learn of it before they gather what comes next. Where all stop, nothing more
    happens. A rank that goes on raises a RuntimeError that names the one that stopped, so that a
    part of the weights is never taken for all of them. With ``rank0_only`` the other ranks' loops
    end without an error, unless a ``with`` block around the stream was left by an exception. If you
    keep the iterator in a variable, call ``close()`` or use it in a ``with`` block: until it is
    closed, the others wait.

    Args:
        module: A module with or without units; sharded, replicated, tensor-parallel, or plain.
        rank0_only: Yield on the lowest rank of the meshes only (of a plain module: on rank 0). The
            others send, and hold nothing.
        dtype: Cast floating-point tensors to it, before they are sent if it is narrower. Those of
            eight bits stay as they are: they would lose their scales.
        max_bytes: What one gather brings. A larger tensor comes alone, in parts of
            ``max(max_bytes, 64 MiB)``.

    Returns:
        An iterator with ``close()``, which is a context manager too. A rank that gets tensors holds
        one such part that was gathered, and the tensors that you keep. While that is gathered it
        also holds, on n ranks, an n-th part of it to send, and gloo a copy.

    Raises:
        NotImplementedError: A parameter is of a tensor subclass, such as float8; or ranks have
            tensors of different shapes, or with ``rank0_only`` different tensors (experts on meshes
            of their own).
        RuntimeError: A forward or backward runs, gradients are pending, the module is inside
            ``unsharded_params``, or another rank stopped.
        ValueError: Tensors are on the meta device.

    >>> import torch, meshard
    >>> from meshard.checkpoint import stream_unsharded
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 2))
    >>> for name, tensor in stream_unsharded(layer):
    ...     print(name, tuple(tensor.shape))
    weight (2, 4)
    bias (2,)
    """
    check_dtype(dtype)
    return WeightStream(module, rank0_only, dtype, max_bytes)


class WeightStream(Iterator[tuple[str, torch.Tensor]]):
    """The iterator of ``stream_unsharded``."""

    def __init__(
        self, module: nn.Module, rank0_only: bool, dtype: torch.dtype | None, max_bytes: int
    ) -> None:
        self._is_over = True  # so that __del__ does nothing if a check below raises
        module = without_wrappers(module)
        self._agreement = Agreement(module, _CALLER)
        self._weights = readable_weights(module, self._agreement, by_one=rank0_only)
        # Without a mesh, all ranks may hold the module.
        first = self._agreement.ranks[0] if self._agreement.device else 0
        self._target = first if rank0_only else None
        self._batches = batches(self._weights, max_bytes, dtype)
        self._ready: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._num_gathered = 0  # of the weights
        self._is_over = not self._weights

    def __iter__(self) -> Self:
        """Return itself: a stream is read once."""
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and tensor. **Collective** where the next batch begins."""
        while True:
            for pair in self._ready:
                return pair
            if self._is_over:
                raise StopIteration
            self._gather_next()

    def close(self) -> None:
        """End the stream, and tell the other ranks. It may be called again.

        **Collective:** unless the stream is at its last batch: the other ranks go on to their next
        batch, or close their streams.
        """
        self._close(Intent.STOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(Intent.STOP if kind is None else Intent.FAIL)

    def __del__(self) -> None:
        # A ``for`` loop that is left drops its iterator. The process group may be destroyed by
        # then.
        if not self._is_over and not sys.is_finalizing() and dist.is_initialized():
            self.close()

    def _close(self, intent: Intent) -> None:
        self._ready = iter(())
        if not self._is_over:
            self._is_over = True
            self._agreement.reach(intent)

    def _gather_next(self) -> None:
        """Agree with the other ranks, and gather the next batch."""
        self._is_over = True  # stays so if anything below raises
        batch = next(self._batches)
        packed, error = list[Packed](), None
        try:
            packed = pack(batch)
        except Exception as raised:  # such as too little memory; the other ranks must learn of it
            error = raised
        intent, rank = self._agreement.reach(Intent.FAIL if error else Intent.GO_ON)
        if error is not None:
            raise error
        if intent is Intent.GO_ON:
            self._ready = gather(batch, packed, self._target)
            self._num_gathered += sum(part.is_last for part in batch)
            self._is_over = self._num_gathered == len(self._weights)
        elif intent is Intent.FAIL or self._target in (None, own_rank()):
            what = "stopped iterating over" if intent is Intent.STOP else "failed inside"
            raise RuntimeError(
                f"rank {rank} {what} {_CALLER} before {batch[0].weight.fqn!r}, so this rank has "
                f"got {self._num_gathered} of {len(self._weights)} tensors only; stop at the same "
                "tensor on all ranks, or iterate to the end on all."
            )
        # Else this rank only sends, so nothing is missing here.


# --- shard_table -----------------------------------------------------------------------------


class HeldRange(NamedTuple):
    """What one rank holds of a tensor: the block that begins at ``offsets`` and has ``sizes``."""

    rank: int  # global
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class ShardedTensorRow(NamedTuple):
    """One tensor of ``shard_table``: its name, unsharded shape, dtype, and who holds what."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as "bfloat16"
    shards: tuple[HeldRange, ...]


def shard_table(module: nn.Module) -> list[ShardedTensorRow]:
    """Return which rank holds which block of which tensor, for a receiver that pulls shards itself.

    Names and their order are those of ``stream_unsharded``. The block of a rank is its local tensor
    (``state_dict()[name].to_local()``), which has the shape ``sizes`` and is contiguous where the
    parameter belongs to a unit. Replicas are listed with each of their ranks, ranks without
    elements are not. All are tuples, strings and numbers: ``json.dumps`` takes the table.

    Not a collective: it follows from the placements. It also serves modules on the meta device.

    Raises:
        NotImplementedError: A parameter is of a tensor subclass, such as float8.
        RuntimeError: A forward or backward runs, gradients are pending, or the module is inside
            ``unsharded_params``.

    >>> import torch, meshard
    >>> from meshard.checkpoint import shard_table
    >>> row = shard_table(meshard.fully_shard(torch.nn.Linear(4, 2)))[0]
    >>> row.name, row.shape, row.dtype
    ('weight', (2, 4), 'float32')
    >>> row.shards
    (HeldRange(rank=0, offsets=(0, 0), sizes=(2, 4)),)
    """
    module = without_wrappers(module)
    weights = weights_of(module, "shard_table")
    everywhere = ranks_of_meshes(meshes_of(module))
    return [_row_of(weight, everywhere) for weight in weights]


def _row_of(weight: Weight, everywhere: list[int]) -> ShardedTensorRow:
    if weight.mesh is None:
        boxes = [(rank, weight.own_box) for rank in everywhere]
    else:
        boxes = [(rank, weight.box_at(place)) for rank, place in coordinates(weight.mesh)]
    shards = (HeldRange(rank, box.offsets, box.sizes) for rank, box in boxes if box.numel)
    return ShardedTensorRow(
        weight.fqn, weight.shape, str(weight.dtype).removeprefix("torch."), tuple(shards)
    )
