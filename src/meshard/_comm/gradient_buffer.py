"""Layout of a unit's gradients in the tensor that is reduced.

A buffer is ``[shard_count, row_numel]``: row ``r`` is what rank ``r`` will own. In each row every
parameter that takes part has its range, with zeros if this rank has no gradient for it. So ranks
that use different parameters still issue the same collective. Behind the ranges a row has a
*count* for each of these parameters: 1 if this rank has a gradient, else 0. Once counts are summed,
a parameter whose count is 0 was used by no rank, and gets no gradient. Divide factors never touch
the counts. A row ends in zeros, up to a multiple of 16 bytes in the narrowest dtype that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch

from meshard._mesh.layout import (
    ROW_BYTES,
    FlatLayout,
    ParamLayout,
    ParamRange,
    matching_parts,
    padded,
)
from meshard._torch.private import chunk_cat

_ROW_NUMEL = ROW_BYTES // 2  # no gradient is sent in a narrower dtype than bfloat16
_LARGE = 2**18  # elements: from this many on, memory matters more than the number of operators


class _Owned(NamedTuple):
    """Where a rank's shard of one parameter lies in the rank's row of the buffer."""

    position: int  # of the parameter in the unit
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GradientLayout:
    """Where the gradients of some of a unit's parameters lie in the buffer. Immutable.

    ``params`` are all parameters of the unit. ``indices`` say which of them take part, in the order
    of the unit. ``at_once``: gradients are packed by one operator, as is faster on a device.
    """

    def __init__(
        self,
        params: Sequence[ParamLayout],
        indices: tuple[int, ...],
        device: torch.device,
        *,
        at_once: bool = False,
    ) -> None:
        # One dtype for all, to get one segment. The buffers may have another dtype.
        flat = FlatLayout.build(params, [torch.float32] * len(params), indices)
        self.params = params
        self.indices = indices
        self._everything = frozenset(indices)
        self.device = device
        self.shard_count = params[0].shard_count
        ranges = flat.segments[0].ranges if flat.segments else ()
        self.ranges: dict[int, ParamRange] = {each.index: each for each in ranges}
        self._ranges = [each for each in ranges if each.numel]
        self.shard_numel = sum(each.numel for each in ranges)
        counted = self.shard_numel + len(indices)
        self.row_numel = padded(counted, _ROW_NUMEL if self.shard_count > 1 else 1)
        self.num_counts = self.row_numel - self.shard_numel  # with padding
        # A large unit packs its gradients one by one. No unit on a device counts as large: there,
        # packing six gradients one by one takes the host 0.8 ms longer than one operator, and the
        # device 2.5 times as long if they are cast (H100, torch 2.11).
        self.is_large = not at_once and self.shard_count * self.shard_numel >= _LARGE
        # On CPU one operator is faster only if it has nothing to pad (9 us for six gradients).
        is_even = all(
            params[each.index].is_regular and params[each.index].shard_dim == 0
            for each in self._ranges
        )
        self._at_once = at_once or (is_even and not self.is_large)
        self._all_used: dict[torch.dtype, torch.Tensor] = {}  # the counts of a rank that uses all
        self._owned: dict[int, list[_Owned]] = {}

    # --- parts of a buffer -----------------------------------------------------------------

    def allocate(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised buffer ``[shard_count, row_numel]``."""
        return torch.empty(self.shard_count, self.row_numel, dtype=dtype, device=self.device)

    def range_of(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return the range of a parameter, ``[..., numel]``, in ``buffer [..., row_numel]``."""
        place = self.ranges[index]
        return buffer.narrow(-1, place.offset, place.numel)

    def shards(
        self, row: torch.Tensor, shard_rank: int, used: frozenset[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Return index and shard of each parameter in ``used``: views of the rank's ``row``."""
        if shard_rank not in self._owned:
            self._owned[shard_rank] = [self._owned_by(shard_rank, i) for i in self.indices]
        # as_strided is one call; narrow and view would take four times as long.
        start, view = row.storage_offset(), row.as_strided
        return [
            (index, view(shape, stride, start + offset))
            for index, offset, shape, stride in self._owned[shard_rank]
            if index in used
        ]

    def _owned_by(self, shard_rank: int, index: int) -> _Owned:
        shape = self.params[index].local_shape(shard_rank)
        stride = torch.empty(shape, device="meta").stride()
        return _Owned(index, self.ranges[index].offset, tuple(shape), tuple(stride))

    # --- counts ----------------------------------------------------------------------------

    def _counts(self, used: AbstractSet[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the end of every row, ``[shard_count, n]``: counts and padding."""
        is_all = used >= self._everything
        if is_all and dtype in self._all_used:
            return self._all_used[dtype]
        row = [float(index in used) for index in self.indices]
        row += [0.0] * (self.num_counts - len(row))
        is_pinned = self.device.type not in ("cpu", "meta")  # so that the host need not wait
        host = torch.tensor(row, dtype=dtype, device="cpu", pin_memory=is_pinned)
        on_device = host.to(self.device, non_blocking=True)
        counts = on_device.expand(self.shard_count, -1).contiguous()
        if is_all:
            self._all_used[dtype] = counts
        return counts

    def write_counts(self, buffer: torch.Tensor, used: AbstractSet[int]) -> None:
        counts = self._counts(used, buffer.dtype)[: buffer.size(0)]
        buffer.narrow(1, self.shard_numel, self.num_counts).copy_(counts)

    def used_anywhere(self, row: torch.Tensor, used: frozenset[int]) -> frozenset[int]:
        """Return the parameters that some rank has used, by the counts of a reduced row.

        ``used`` are those of this rank. Waits for the device unless they are all.
        """
        if used >= self._everything:
            return used
        counts = row.narrow(0, self.shard_numel, len(self.indices)).tolist()
        return frozenset(i for i, count in zip(self.indices, counts, strict=True) if count > 0)

    # --- gradients in ----------------------------------------------------------------------

    def reduce_scatter_copy_in(
        self,
        buffer: torch.Tensor,
        gradients: list[torch.Tensor | None],
        used: AbstractSet[int],
    ) -> None:
        """Overwrite ``buffer`` with unsharded gradients and the counts of ``used``.

        ``gradients`` has an entry for each parameter of the unit. In a large unit each entry is
        replaced by None once it is copied, so that not all gradients exist twice.
        """
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        if self._at_once and _fits_chunk_cat(dtypes, buffer):
            (dtype,) = dtypes
            parts = [self._in_rows(gradients[each.index], each, dtype) for each in self._ranges]
            chunk_cat([*parts, self._counts(used, dtype)], 0, self.shard_count, out=buffer)
            return
        for each in self._ranges:
            gradient, layout = gradients[each.index], self.params[each.index]
            part = buffer.narrow(1, each.offset, each.numel)
            if gradient is None or not layout.is_regular:
                part.zero_()
            if gradient is not None:
                _copy_into(part, gradient, layout)
            if self.is_large:
                gradients[each.index] = None
        self.write_counts(buffer, used)

    def _in_rows(
        self, gradient: torch.Tensor | None, each: ParamRange, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return what ``chunk_cat`` cuts along dim 0; it adds zeros where that has too few rows."""
        layout = self.params[each.index]
        if gradient is None:
            return torch.zeros(1, each.numel, dtype=dtype, device=self.device)
        if layout.shard_dim == 0:
            return gradient
        if layout.is_regular:
            return gradient.reshape(self.shard_count, -1)
        rows = gradient.new_zeros(self.shard_count, each.numel)
        _copy_into(rows, gradient, layout)
        return rows

    def add(
        self, buffer: torch.Tensor, gradients: list[torch.Tensor | None], used: AbstractSet[int]
    ) -> None:
        """Add unsharded gradients to ``buffer``, whose counts become those of ``used``.

        In a large unit each entry is replaced by None once it is added, which frees its memory.
        """
        for each in self._ranges:
            gradient, layout = gradients[each.index], self.params[each.index]
            if gradient is not None:
                part = buffer.narrow(1, each.offset, each.numel)
                for ours, theirs in matching_parts(part, gradient, layout):
                    ours.add_(theirs)
            if self.is_large:
                gradients[each.index] = None
        self.write_counts(buffer, used)

    def cut_again(self, row: torch.Tensor, to: GradientLayout, rows: torch.Tensor) -> None:
        """Write this rank's ``row`` to ``rows [replicas, n]`` in layout ``to``, counts included.

        ``to`` has the same parameters, each with the shape of this rank's shard.
        """
        for index, each in to.ranges.items():
            layout, part = to.params[index], rows.narrow(1, each.offset, each.numel)
            if not layout.is_regular:
                part.zero_()
            _copy_into(part, self.range_of(row, index)[: layout.numel], layout)
        rows.narrow(1, to.shard_numel, to.num_counts).zero_()
        num, counts = len(self.indices), row.narrow(0, self.shard_numel, len(self.indices))
        rows.narrow(1, to.shard_numel, num).copy_(counts)

    def run_hooks(
        self,
        hooks: Sequence[Callable[[torch.Tensor], object]],
        buffer: torch.Tensor,
        used: frozenset[int],
    ) -> None:
        """Run the user's hooks on the gradients. What they write for unused ones is dropped."""
        if not hooks:
            return
        visible = buffer.narrow(-1, 0, self.shard_numel)
        given = visible.contiguous()  # hooks may communicate, and backends do not look at strides
        run_hooks(hooks, given)
        if given is not visible:
            visible.copy_(given)
        for index in self.ranges.keys() - used:
            self.range_of(buffer, index).zero_()

    # --- sums of earlier microbatches ------------------------------------------------------

    def erase(self, buffer: torch.Tensor, erased: AbstractSet[int]) -> None:
        """Set gradients and counts to zero, in ``buffer [..., row_numel]``."""
        for position, index in enumerate(self.indices):
            if index in erased:
                self.range_of(buffer, index).zero_()
                buffer.narrow(-1, self.shard_numel + position, 1).zero_()

    def move(self, buffer: torch.Tensor, to: GradientLayout, used: frozenset[int]) -> torch.Tensor:
        """Return the gradients ``used`` of ``buffer`` in layout ``to``, with zeros elsewhere."""
        moved = buffer.new_zeros((*buffer.shape[:-1], to.row_numel))
        for index in used:
            to.range_of(moved, index).copy_(self.range_of(buffer, index))
            own = self.shard_numel + self.indices.index(index)
            moved[..., to.shard_numel + to.indices.index(index)] = buffer[..., own]
        return moved


def run_hooks(hooks: Sequence[Callable[[torch.Tensor], object]], buffer: torch.Tensor) -> None:
    """Run the user's hooks on ``buffer``."""
    for hook in hooks:
        if (result := hook(buffer)) is not None and result is not buffer:
            raise TypeError(
                f"the reduce hook {hook!r} returned a value; change the tensor in place."
            )


def _fits_chunk_cat(dtypes: AbstractSet[torch.dtype], buffer: torch.Tensor) -> bool:
    """Whether ``torch._chunk_cat`` can write gradients of these dtypes to ``buffer``."""
    if dtypes == {buffer.dtype}:
        return True
    return buffer.is_cuda and buffer.dtype == torch.float32 and dtypes == {torch.bfloat16}


def _copy_into(ranges: torch.Tensor, gradient: torch.Tensor, layout: ParamLayout) -> None:
    for ours, theirs in matching_parts(ranges, gradient, layout):
        ours.copy_(theirs)


class FlatGradients(NamedTuple):
    """Gradients of some parameters in one flat tensor."""

    layout: GradientLayout
    flat: torch.Tensor  # [row_numel], or [shard_count, row_numel] before any reduction
    used: frozenset[int]  # the parameters that have a gradient

    def shards(self, shard_rank: int) -> list[tuple[int, torch.Tensor]]:
        """Return the shard of each parameter: views of ``flat``, which has been reduced."""
        return self.layout.shards(self.flat, shard_rank, self.used)

    def laid_out(self, layout: GradientLayout) -> torch.Tensor:
        """Return ``flat`` in ``layout``, which must have all parameters in ``used``."""
        if self.layout is layout:
            return self.flat
        return self.layout.move(self.flat, layout, self.used)

    def without(self, erased: frozenset[int]) -> FlatGradients | None:
        """Erase gradients in place. Return the rest; None if ``erased`` has the whole layout."""
        self.layout.erase(self.flat, erased)
        if erased.issuperset(self.layout.indices):
            return None
        return self._replace(used=self.used - erased)
