"""Buffers, scalar operands and copies shared by gathers and reductions."""

from __future__ import annotations

import torch

from meshard._mesh.layout import ParamLayout
from meshard._torch.private import foreach_copy_

_MAX_OPERANDS = 64
_EXACT = (torch.float32, torch.float64)  # kernels of narrower dtypes use the number as float32


class ScalarOperands:
    """Numbers as 0-d tensors, made once per model.

    torch makes a float64 tensor of a Python number at every call and casts it, which takes longer
    than multiplying a thousand elements. A 0-d CPU tensor of the dtype of the other operand is used
    as it is, with the same result.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def as_operand(self, number: float, other: torch.Tensor) -> float | torch.Tensor:
        """Return what to pass to an operator with ``other`` instead of ``number``."""
        dtype = other.dtype
        if not other.is_cpu or dtype not in _EXACT:
            return number
        key = (number, dtype)
        if key not in self._made:
            if len(self._made) >= _MAX_OPERANDS:  # a divide factor that changes with every batch
                self._made.clear()
            self._made[key] = torch.full((), number, dtype=dtype, device=other.device)
        return self._made[key]


def matching_parts(
    ranges: torch.Tensor, unsharded: torch.Tensor, layout: ParamLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of views, of the ranges and of the unsharded tensor, with the same elements.

    At most two pairs: all full chunks, and the chunk of the rank that owns fewer rows.

    Args:
        ranges: ``[shard_count, range_numel]``, rank by rank.
        unsharded: A parameter or gradient, of any strides.
        layout: How it is cut.
    """
    parts = []
    chunk, full = layout.chunk_rows, layout.full_chunks
    # A view: unsharded parameters, which are written to, are contiguous.
    rows = unsharded.reshape(layout.prefix, layout.rows, layout.suffix)
    if full and layout.range_numel:
        ours = ranges[:full].view(full, layout.prefix, chunk, layout.suffix)
        theirs = rows[:, : full * chunk].unflatten(1, (full, chunk))
        parts.append((ours.transpose(0, 1), theirs))
    rest = layout.rows - full * chunk
    if rest and layout.range_numel:
        owned = ranges[full, : layout.prefix * rest * layout.suffix]
        parts.append((owned.view(layout.prefix, rest, layout.suffix), rows[:, full * chunk :]))
    return parts


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])  # half the time of the foreach operator
    else:
        foreach_copy_(targets, sources)


_TINY = 2**14  # bytes


class ReusableBuffer:
    """``rows [count, numel]`` that have memory only from ``take`` to ``free``.

    Reusing its tensors is faster than making them in each step. Only for memory that the host alone
    uses: ``free`` waits for no stream.
    """

    def __init__(self, like: torch.Tensor, count: int, numel: int) -> None:
        with torch.inference_mode(False):  # a module may run under it first and train later
            self.flat = like.new_empty(count * numel)
            self.rows = self.flat.view(count, numel)
        storage = self.flat.untyped_storage()
        self._num_bytes, self._resize = storage.nbytes(), storage.resize_
        # malloc does not return such a small block to the OS.
        self._stays = self._num_bytes <= _TINY
        self.free()

    def take(self) -> None:
        if not self._stays:
            self._resize(self._num_bytes)

    def free(self) -> None:
        if not self._stays:
            self._resize(0)
