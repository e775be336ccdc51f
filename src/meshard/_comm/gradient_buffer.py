"""Layout of a unit's gradients in the buffer that is reduced.

A buffer is ``[shard_count, shard_numel]``: row ``r`` is what rank ``r`` will own. In each row every
parameter that takes part has its range, even if this rank has no gradient for it. So ranks that use
different parameters still issue the same collective. A row ends in zeros, up to a multiple of 16
bytes in the narrowest dtype that is sent.

**Negative zero marks an unused parameter.** A rank without a gradient fills the range of the
parameter with ``-0.0``; a rank with a gradient makes sure that the first element of the range is
not ``-0.0``. By IEEE 754 (section 6.3) a sum is ``-0.0`` only if every term is. (This fails if
denormals are flushed to zero: ``torch.set_flush_denormal``.) So the first element of the sum is
``-0.0``, a *mark*, exactly if no rank had a gradient. Dividing can underflow to ``-0.0``. So marks
are read from a sum before it is divided, and written again before anything reads them later. A rank
that has all gradients reads no mark. A rank that lacks some must read the marks, and so wait for
its device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch

from meshard._comm.communicator import Rows
from meshard._mesh.layout import (
    ROW_BYTES,
    FlatLayout,
    ParamLayout,
    ParamRange,
    Segment,
    matching_parts,
    padded,
)
from meshard._torch.private import chunk_cat

_MAX_MARKS = 16
# The range of a used parameter must not begin with ``-0.0``, so 0.0 is added to its first element.
# If all parameters are used, 0.0 may be added to every element instead. This needs no indexing. It
# is faster (4 against 120 us for six parameters on 4096 ranks) if the buffer has at most ``_SMALL``
# elements, or each row at most ``_FEW`` elements per parameter. On a device the first limit is
# ``_SMALL_ON_DEVICE``: indexing launches several kernels there, and an addition only one.
_SMALL, _SMALL_ON_DEVICE, _FEW = 2**14, 2**23, 8
_ROW_NUMEL = ROW_BYTES // 2  # no gradient is sent in a narrower dtype than bfloat16
_LARGE = 2**18  # elements: from this many on, memory matters more than the number of operators


class _Owned(NamedTuple):
    """Where a rank's shard of one parameter lies in the rank's row of the buffer."""

    position: int  # of the parameter in the unit
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GradientLayout:
    """Where the gradients of some of a unit's parameters lie in the send buffer. Immutable.

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
        self.device = device
        self.shard_count = params[0].shard_count
        segment = flat.segments[0] if flat.segments else Segment(torch.float32, 0, (), 0)
        self.ranges: dict[int, ParamRange] = {each.index: each for each in segment.ranges}
        self.shard_numel = padded(segment.numel, _ROW_NUMEL if self.shard_count > 1 else 1)
        self._padding = self.shard_numel - segment.numel
        self._zeros: dict[torch.dtype, torch.Tensor] = {}  # of padding
        self.regular = [each.index for each in segment.ranges[: segment.num_regular]]
        self.regular_numel = segment.regular_numel
        self.irregular = [each for each in segment.ranges[segment.num_regular :] if each.numel]
        self._all_ranges = [*segment.ranges[: segment.num_regular], *self.irregular]
        # A large unit packs its gradients one by one. No unit on a device counts as large: there,
        # packing six gradients one by one takes the host 0.8 ms longer than one operator, and the
        # device 2.5 times as long if they are cast (H100, torch 2.11).
        self.is_large = not at_once and self.numel >= _LARGE
        # On CPU one operator is faster only if it has nothing to pad (9 us for six gradients).
        is_even = not self.irregular and all(params[i].shard_dim == 0 for i in self.regular)
        self._at_once = bool(self._all_ranges) and (at_once or (is_even and not self.is_large))
        self._small = _SMALL_ON_DEVICE if at_once else _SMALL
        self._marks: dict[frozenset[int], UnusedParamMarks] = {}
        self._owned: dict[int, list[_Owned]] = {}

    @property
    def numel(self) -> int:
        """Elements of a buffer."""
        return self.shard_count * self.shard_numel

    @functools.cached_property
    def _first_columns(self) -> torch.Tensor:
        return _sent_to(self.device, [each.offset for each in self._all_ranges])

    def range_of(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return the range of a parameter, ``[..., numel]``, in ``buffer [..., shard_numel]``."""
        place = self.ranges[index]
        return buffer.narrow(-1, place.offset, place.numel)

    def allocate(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised buffer ``[shard_count, shard_numel]``."""
        return torch.empty(self.shard_count, self.shard_numel, dtype=dtype, device=self.device)

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

    def reduce_scatter_copy_in(self, rows: Rows, gradients: list[torch.Tensor | None]) -> None:
        """Overwrite ``rows`` with unsharded gradients; ranges without a gradient become ``-0.0``.

        ``gradients`` has an entry for each parameter of the unit. In a large unit each entry is
        replaced by None once it is copied, so that not all gradients exist twice.
        """
        ranges = self._all_ranges
        if self._at_once and len(rows) == 1:
            dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
            if _fits_chunk_cat(dtypes, rows[0]):
                self._write_at_once(rows[0], gradients)
                return
        if self.regular and not self.is_large:
            regular = [g for index in self.regular if (g := gradients[index]) is not None]
            if len(regular) == len(self.regular):
                self._concatenate(regular, rows)
                ranges = self.irregular
        for block in rows:
            self._zero_padding(block)
        for each in ranges:
            self._write(rows, each, gradients[each.index])
            if self.is_large:
                gradients[each.index] = None

    def _write_at_once(self, buffer: torch.Tensor, gradients: list[torch.Tensor | None]) -> None:
        dtype = next(gradient.dtype for gradient in gradients if gradient is not None)
        sources, missing = list[torch.Tensor](), list[ParamRange]()
        for each in self._all_ranges:
            gradient, layout = gradients[each.index], self.params[each.index]
            if gradient is None:  # chunk_cat makes of one row as many as there are ranks
                missing.append(each)
                sources.append(buffer.new_empty(1, each.numel, dtype=dtype))
            else:  # it pads what is cut along dim 0, too
                sources.append(gradient if layout.shard_dim == 0 else _in_rows(gradient, layout))
        if self._padding:
            if dtype not in self._zeros:
                self._zeros[dtype] = buffer.new_zeros(1, self._padding, dtype=dtype)
            sources.append(self._zeros[dtype])
        chunk_cat(sources, 0, self.shard_count, out=buffer)
        for each in missing:
            buffer.narrow(1, each.offset, each.numel).fill_(-0.0)

    def _concatenate(self, gradients: list[torch.Tensor], rows: Rows) -> None:
        """Write the gradients of all regular parameters."""
        split = [gradient.reshape(self.shard_count, -1).chunk(len(rows)) for gradient in gradients]
        for block, pieces in zip(rows, zip(*split, strict=True), strict=True):
            torch.cat(pieces, dim=1, out=block.narrow(1, 0, self.regular_numel))

    def _write(self, rows: Rows, each: ParamRange, gradient: torch.Tensor | None) -> None:
        layout = self.params[each.index]
        parts = [block.narrow(1, each.offset, each.numel) for block in rows]
        if gradient is None:
            for part in parts:
                part.fill_(-0.0)
            return
        if len(parts) == 1 and not layout.is_regular:
            parts[0].fill_(0.0)
            _copy_into(parts[0], gradient, layout)
            return
        for part, source in zip(parts, _in_rows(gradient, layout).chunk(len(parts)), strict=True):
            part.copy_(source)

    def _zero_padding(self, buffer: torch.Tensor) -> None:
        if self._padding:
            buffer.narrow(-1, self.shard_numel - self._padding, self._padding).zero_()

    def add(self, buffer: torch.Tensor, gradients: list[torch.Tensor | None]) -> None:
        """Add unsharded gradients to ``buffer``.

        In a large unit each entry is replaced by None once it is added, which frees its memory.
        """
        for each in self._all_ranges:
            gradient, layout = gradients[each.index], self.params[each.index]
            if gradient is not None:
                part = buffer.narrow(1, each.offset, each.numel)
                if not layout.is_regular:
                    part.add_(0.0)  # turns the padding into 0.0: in an unused range it was -0.0
                for ours, theirs in matching_parts(part, gradient, layout):
                    ours.add_(theirs)
            if self.is_large:
                gradients[each.index] = None

    def run_hooks(
        self,
        hooks: Sequence[Callable[[torch.Tensor], object]],
        buffer: torch.Tensor,
        used: frozenset[int],
    ) -> None:
        """Run the user's hooks on ``buffer`` without its padding; mark unused parameters again."""
        if not hooks:
            return
        visible = buffer.narrow(-1, 0, self.shard_numel - self._padding)
        given = visible.contiguous()  # hooks may communicate, and backends do not look at strides
        run_hooks(hooks, given)
        if given is not visible:
            visible.copy_(given)
        self.mark_unused(buffer, used)

    def mark_unused(self, buffer: torch.Tensor, used: frozenset[int]) -> None:
        """Fill the ranges of parameters not in ``used`` with ``-0.0``, in ``buffer [..., n]``."""
        for index, param_range in self.ranges.items():
            if index not in used:
                buffer.narrow(-1, param_range.offset, param_range.numel).fill_(-0.0)

    def marks_for(self, used: frozenset[int]) -> UnusedParamMarks:
        """Return the marks of a rank that has gradients for ``used``. They are cached per set."""
        if used not in self._marks:
            if len(self._marks) >= _MAX_MARKS:  # a mixture of experts has many different sets
                self._marks.clear()
            # An empty range has no element for a mark. It counts as used on every rank.
            empty = self.ranges.keys() - {each.index for each in self._all_ranges}
            self._marks[used] = UnusedParamMarks(
                self._all_ranges,
                self._first_columns,
                used | empty,
                small=self._small,
            )
        return self._marks[used]

    def move(self, buffer: torch.Tensor, to: GradientLayout, used: frozenset[int]) -> torch.Tensor:
        """Return the gradients ``used`` of ``buffer`` in layout ``to``, with ``-0.0`` elsewhere."""
        shape = (*buffer.shape[:-1], to.shard_numel)
        moved = torch.full(shape, -0.0, dtype=buffer.dtype, device=buffer.device)
        to._zero_padding(moved)
        for index in used:
            source, target = self.ranges[index], to.ranges[index]
            moved.narrow(-1, target.offset, target.numel).copy_(
                buffer.narrow(-1, source.offset, source.numel)
            )
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


def _in_rows(gradient: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """Return ``[shard_count, range_numel]``, with the shards of all ranks and their padding."""
    if layout.is_regular:
        return gradient.reshape(layout.shard_count, -1)
    rows = gradient.new_zeros(layout.shard_count, layout.range_numel)
    _copy_into(rows, gradient, layout)
    return rows


def _copy_into(ranges: torch.Tensor, gradient: torch.Tensor, layout: ParamLayout) -> None:
    for ours, theirs in matching_parts(ranges, gradient, layout):
        ours.copy_(theirs)


class FlatGradients(NamedTuple):
    """Gradients of some parameters in one flat tensor."""

    layout: GradientLayout
    flat: torch.Tensor  # [shard_numel], or [shard_count, shard_numel] before any reduction
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
        used = self.used - erased
        self.layout.mark_unused(self.flat, used)
        if erased.issuperset(self.layout.indices):
            return None
        return self._replace(used=used)


# --- marks of unused parameters -------------------------------------------------------------------


def _sent_to(device: torch.device, numbers: list[int]) -> torch.Tensor:
    """Return ``numbers`` on ``device``. The host does not wait: this may be called in each step."""
    is_pinned = device.type not in ("cpu", "meta")
    host = torch.tensor(numbers, dtype=torch.long, device="cpu", pin_memory=is_pinned)
    return host.to(device, non_blocking=True)


class UnusedParamMarks:
    """The marks that a rank with gradients for ``used`` reads and writes. Immutable."""

    def __init__(
        self,
        ranges: Sequence[ParamRange],  # those that have elements
        columns: torch.Tensor,  # the column of each range's first element
        used: frozenset[int],  # parameters for which this rank has a gradient
        *,
        small: int,  # elements of a buffer to which 0.0 is added as a whole
    ) -> None:
        self.used = used
        self._small = small
        self._indices = [each.index for each in ranges]
        self._columns = columns
        self.all_used = used.issuperset(self._indices)  # if so, this rank reads no mark
        used_columns = [each.offset for each in ranges if each.index in used]
        self._used_columns = _sent_to(columns.device, used_columns)

    def mark_sent(self, buffer: torch.Tensor) -> None:
        """In ``buffer [..., n]``, turn ``-0.0`` at the start of used ranges into ``0.0``."""
        columns = self._used_columns
        if self.all_used and self._is_dense(buffer):
            buffer.add_(0.0)
        elif columns.numel():
            # Not index_add_: CUDA adds to 16-bit elements in pairs, so 0.0 would also be added to
            # a neighbour, which may be a mark.
            buffer.index_copy_(-1, columns, buffer.index_select(-1, columns) + 0.0)

    def _is_dense(self, buffer: torch.Tensor) -> bool:
        return buffer.numel() <= self._small or buffer.size(-1) <= _FEW * self._used_columns.numel()

    def is_marked(self, flat: torch.Tensor) -> torch.Tensor:
        """Return which ranges of ``flat [n]`` start with ``-0.0``."""
        first = flat.index_select(0, self._columns)
        return torch.signbit(first) & (first == 0)

    def read(self, raw_sum: torch.Tensor) -> torch.Tensor | None:
        """Return which ranges no rank used; None if this rank used all."""
        return None if self.all_used else self.is_marked(raw_sum)

    def write(self, flat: torch.Tensor, unused: torch.Tensor | None) -> None:
        """Restore the marks of ``flat [n]`` to what ``read`` returned."""
        if not self._columns.numel():
            return
        if unused is None and self._is_dense(flat):
            flat.add_(0.0)
            return
        first = flat.index_select(0, self._columns) + 0.0
        if unused is not None:
            first.masked_fill_(unused, -0.0)
        flat.index_copy_(0, self._columns, first)

    def used_after(self, unused: torch.Tensor | None) -> frozenset[int]:
        """Return the parameters that some rank used.

        ``unused`` is what ``read`` returned. Waits for the device unless this rank used all.
        """
        if unused is None:
            return self.used
        pairs = zip(self._indices, unused.tolist(), strict=True)
        return self.used | {index for index, is_unused in pairs if not is_unused}
