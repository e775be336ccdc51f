"""Buffers, operands and copies shared by gathers and reductions.

torch makes a float64 tensor of a Python number at every call and casts it, which takes longer than
to multiply a thousand elements by it. A tensor without dims, of the dtype of the other operand and
in host memory, is used as it is, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshard._mesh.layout import ParamLayout

_MOST = 64
_EXACT = (torch.float32, torch.float64)  # narrower ones compute with the number as float32


class ScalarOperands:
    """Numbers as tensors, made once. They live as long as what uses them: the model."""

    def __init__(self) -> None:
        self._made: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def as_operand(self, number: float, other: torch.Tensor) -> float | torch.Tensor:
        """Return what to pass to a kernel beside ``other`` instead of ``number``."""
        dtype = other.dtype
        if not other.is_cpu or dtype not in _EXACT:
            return number
        key = (number, dtype)
        if key not in self._made:
            if len(self._made) >= _MOST:  # a divide factor that changes with every batch
                self._made.clear()
            self._made[key] = torch.full((), number, dtype=dtype, device=other.device)
        return self._made[key]


def matching_parts(
    ranges: torch.Tensor, unsharded: torch.Tensor, layout: ParamLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of views, of the slots and of the whole parameter, that hold the same elements.

    At most two pairs: all full chunks at once, and the one rank that owns fewer rows.

    Args:
        slots: ``[shard_count, range_numel]``, rank by rank.
        whole: The whole parameter, or a whole gradient; any strides.
        layout: How it is cut.
    """
    parts = []
    chunk, full = layout.chunk_rows, layout.full_chunks
    # reshape is a view for contiguous tensors, which whole parameters are by construction.
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
    """Copy each source into its target, which have the same shapes, in one call of torch."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])  # half the time
    else:
        torch._foreach_copy_(targets, sources)


_TINY = 2**14  # bytes


class ReusableBuffer:
    """A buffer ``[count, n]`` that is made once, and has memory only from ``take`` to ``free``.

    Tensors are made once instead of in each step, which takes longer than to move their memory.
    Only for memory that the host alone uses: no stream is asked whether it may go.

    Args:
        like: Of the dtype and device wanted.
        count: Rows.
        numel: Elements of a row.
        cut: Makes the views of ``rows`` that its user wants to keep beside it.
    """

    def __init__(
        self,
        like: torch.Tensor,
        count: int,
        numel: int,
        cut: Callable[[torch.Tensor], list[torch.Tensor]] | None = None,
    ) -> None:
        with torch.inference_mode(False):  # a module that runs under it first must train later
            self.flat = like.new_empty(count * numel)
            self.rows = self.flat.view(count, numel)
            self.views = [] if cut is None else cut(self.rows)
        storage = self.flat.untyped_storage()
        self._num_bytes = storage.nbytes()
        self._resize = storage.resize_
        # The system would not have such a piece back from malloc.
        self._stays = self._num_bytes <= _TINY
        self.free()

    def take(self) -> None:
        """Have memory. The content is undefined until it is filled."""
        if not self._stays:
            self._resize(self._num_bytes)

    def free(self) -> None:
        """Give the memory back."""
        if not self._stays:
            self._resize(0)
