"""Layout of a unit's gradients in the buffer that is reduced.

A buffer is ``[shard_count, shard_numel]``: row ``r`` is what rank ``r`` will own. Every parameter
that takes part has its range in it, whether this rank has a gradient or not, so ranks that use
different parameters still issue the same collective. A range without a gradient is filled with
``-0.0``: see ``unused_params``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from meshard._comm.buffers import ReusableBuffer, ScalarOperands, copy_all, matching_parts
from meshard._comm.communicator import Rows
from meshard._comm.unused_params import UnusedParamMarks
from meshard._mesh.layout import FlatLayout, ParamLayout, ParamRange
from meshard._torch.private import chunk_cat

_MAX_MARKS = 16
_FEW = 3600  # elements: from here on torch transposes by blocks, slower than column by column
_MAX_COLUMNS = 16
_LARGE = 2**18  # elements: from here on bytes matter more than the number of kernels


class _Owned(NamedTuple):
    """The part of one parameter that a rank owns, in a row."""

    position: int  # of the parameter in the unit
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GradientLayout:
    """Where the gradients of some of a unit's parameters lie in what is sent. Immutable.

    Args:
        params: All parameters of the unit.
        indices: Those that take part, in the order of the unit.
        device: Device of the buffers.
    """

    def __init__(
        self, params: Sequence[ParamLayout], indices: tuple[int, ...], device: torch.device
    ) -> None:
        # One segment: all gradients of a unit are sent in one dtype, chosen per buffer.
        flat = FlatLayout.build(params, [torch.float32] * len(params), indices)
        self.params = params
        self.indices = indices
        self.device = device
        self.shard_count = params[0].shard_count
        ranges = flat.segments[0].ranges if flat.segments else ()
        num_regular = flat.segments[0].num_regular if flat.segments else 0
        self.ranges: dict[int, ParamRange] = {
            param_range.index: param_range for param_range in ranges
        }
        self.shard_numel = flat.segments[0].numel if flat.segments else 0
        self.regular = [param_range.index for param_range in ranges[:num_regular]]
        self.regular_numel = flat.segments[0].regular_numel if flat.segments else 0
        self.irregular = [param_range for param_range in ranges[num_regular:] if param_range.numel]
        self.is_large = self.numel >= _LARGE
        self._is_by_element = self.regular_numel == len(self.regular) > 1
        self._is_cut_along_0 = all(params[index].shard_dim == 0 for index in self.regular)
        self._marks: dict[frozenset[int], UnusedParamMarks] = {}
        self._operands = ScalarOperands()
        self._reusable: dict[torch.dtype, ReusableBuffer] = {}
        self._owned: dict[int, list[_Owned]] = {}

    @property
    def numel(self) -> int:
        """Elements of a buffer."""
        return self.shard_count * self.shard_numel

    def allocate(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised buffer ``[shard_count, shard_numel]``."""
        return torch.empty(self.shard_count, self.shard_numel, dtype=dtype, device=self.device)

    def reusable_buffer(self, dtype: torch.dtype) -> ReusableBuffer:
        """Return the buffer that every step reuses, for one reduction at a time."""
        if dtype not in self._reusable:
            like = torch.empty(0, dtype=dtype, device=self.device)
            self._reusable[dtype] = ReusableBuffer(like, self.shard_count, self.shard_numel)
        return self._reusable[dtype]

    def shards(
        self, row: torch.Tensor, shard_rank: int, used: frozenset[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Return what ``shard_rank`` owns of each parameter in ``used``: views of its ``row``.

        Args:
            row: ``[shard_numel]``, contiguous.
            shard_rank: Whose row it is.
            used: Parameters to return; they come in the order of the unit.
        """
        if shard_rank not in self._owned:
            self._owned[shard_rank] = [self._owned_by(shard_rank, i) for i in self.indices]
        # One call: narrow and view take four times as long.
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

    def pack(self, buffer: Rows, gradients: list[torch.Tensor | None]) -> None:
        """Overwrite ``buffer`` with unsharded gradients; ranges without one become ``-0.0``.

        Args:
            buffer: ``[shard_count, shard_numel]`` of any floating-point dtype, or a list of rows.
            gradients: One entry per parameter of the unit. In a large unit each is replaced by None
                once it is copied, so that not all exist twice.
        """
        if isinstance(buffer, list):
            self._pack_rows(buffer, gradients)
            return
        if self.regular:
            target = buffer
            if self.regular_numel < self.shard_numel:
                target = buffer.narrow(1, 0, self.regular_numel)
            present = [g for index in self.regular if (g := gradients[index]) is not None]
            is_complete = len(present) == len(self.regular)
            if is_complete and not self.is_large:
                self._concatenate(present, target)
            else:
                if not is_complete:
                    target.fill_(-0.0)
                present.clear()  # it would keep them alive
                self._write(buffer, gradients, [self.ranges[index] for index in self.regular])
        for param_range in self.irregular:
            buffer.narrow(1, param_range.offset, param_range.numel).fill_(
                -0.0 if gradients[param_range.index] is None else 0.0
            )
        if self.irregular:
            self._write(buffer, gradients, self.irregular)

    def _concatenate(self, gradients: list[torch.Tensor], target: torch.Tensor) -> None:
        if len(gradients) == 1:
            target.copy_(gradients[0].reshape(self.shard_count, -1))
        elif self._is_by_element:
            self._transpose(gradients, target)
        elif self._is_cut_along_0 and {g.dtype for g in gradients} == {target.dtype}:
            # One operator instead of those below: 6 us less for six gradients.
            chunk_cat(gradients, 0, self.shard_count, out=target)
        else:
            rows = [gradient.reshape(self.shard_count, -1) for gradient in gradients]
            torch.cat(rows, dim=1, out=target)

    @staticmethod
    def _transpose(gradients: list[torch.Tensor], target: torch.Tensor) -> None:
        """Write gradients of which every rank owns one element.

        By column or as one transposed copy, whichever is faster. Measured: 6 gradients on 4096
        ranks take 16 and 29 us, on 64 ranks 10 and 8; torch's kernel for single elements takes 39.
        """
        if target.numel() >= _FEW and len(gradients) <= _MAX_COLUMNS:
            lines = [gradient.reshape(-1) for gradient in gradients]
            copy_all(list(target.unbind(1)), lines)
        else:
            joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
            target.copy_(joined.view(len(gradients), -1).t())

    def _pack_rows(self, rows: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
        regular = [gradients[index] for index in self.regular]
        if regular and not self.is_large and all(gradient is not None for gradient in regular):
            split = [g.reshape(self.shard_count, -1).unbind() for g in regular if g is not None]
            for row, pieces in zip(rows, zip(*split, strict=True), strict=True):
                torch.cat(pieces, out=row[: self.regular_numel])
            ranges = self.irregular
        else:
            ranges = [*(self.ranges[index] for index in self.regular), *self.irregular]
        regular.clear()  # it would keep them alive
        for param_range in ranges:
            parts = [row.narrow(0, param_range.offset, param_range.numel) for row in rows]
            self._write_rows(param_range, parts, gradients)
            if self.is_large:
                gradients[param_range.index] = None

    def _write_rows(
        self,
        param_range: ParamRange,
        parts: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
    ) -> None:
        gradient = gradients[param_range.index]
        if gradient is None:
            for part in parts:
                part.fill_(-0.0)
        elif self.params[param_range.index].is_regular:
            for part, source in zip(parts, gradient.reshape(self.shard_count, -1), strict=True):
                part.copy_(source)
        else:
            padded = parts[0].new_zeros(self.shard_count, param_range.numel)
            _copy_into(padded, gradient, self.params[param_range.index])
            for part, source in zip(parts, padded, strict=True):
                part.copy_(source)

    def _write(
        self,
        buffer: torch.Tensor,
        gradients: list[torch.Tensor | None],
        ranges: Sequence[ParamRange],
    ) -> None:
        for param_range in ranges:
            gradient = gradients[param_range.index]
            if gradient is not None:
                part = buffer.narrow(1, param_range.offset, param_range.numel)
                _copy_into(part, gradient, self.params[param_range.index])
                if self.is_large:
                    gradients[param_range.index] = None

    def add(self, buffer: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add unsharded gradients to ``buffer``."""
        for index in self.regular:
            gradient = gradients[index]
            if gradient is not None:
                param_range = self.ranges[index]
                rows = gradient.reshape(self.shard_count, -1)
                buffer.narrow(1, param_range.offset, param_range.numel).add_(rows)
        for param_range in self.irregular:
            gradient = gradients[param_range.index]
            if gradient is not None:
                part = buffer.narrow(1, param_range.offset, param_range.numel)
                part.add_(0.0)  # padding of a range that was unused until now: -0.0 becomes 0.0
                for ours, theirs in matching_parts(part, gradient, self.params[param_range.index]):
                    ours.add_(theirs)

    def run_hooks(
        self,
        hooks: Sequence[Callable[[torch.Tensor], object]],
        buffer: torch.Tensor,
        used: frozenset[int],
    ) -> None:
        """Run the user's hooks on ``buffer``, and mark unused parameters again.

        Raises:
            TypeError: A hook returned another tensor; it must change its argument in place.
        """
        for hook in hooks:
            result = hook(buffer)
            if result is not None and result is not buffer:
                raise TypeError(
                    f"the reduce hook {hook!r} returned a value; change the tensor in place."
                )
        if hooks:
            for index, param_range in self.ranges.items():
                if index not in used:
                    buffer.narrow(-1, param_range.offset, param_range.numel).fill_(-0.0)

    def marks_for(self, used: frozenset[int]) -> UnusedParamMarks:
        """Return the marks of a rank that has gradients for ``used``; made once per set."""
        if used not in self._marks:
            if len(self._marks) >= _MAX_MARKS:  # with experts, almost every step has a new set
                self._marks.clear()
            offsets = {
                i: param_range.offset for i, param_range in self.ranges.items() if param_range.numel
            }
            # An empty range cannot be marked: count it as used, so that all ranks agree.
            empty = {index for index, param_range in self.ranges.items() if not param_range.numel}
            self._marks[used] = UnusedParamMarks(offsets, used | empty, self.device, self._operands)
        return self._marks[used]

    def move(self, buffer: torch.Tensor, to: GradientLayout, used: frozenset[int]) -> torch.Tensor:
        """Return the gradients ``used`` of ``buffer`` in the layout ``to``; others are ``-0.0``."""
        shape = (*buffer.shape[:-1], to.shard_numel)
        moved = torch.full(shape, -0.0, dtype=buffer.dtype, device=buffer.device)
        for index in used:
            source, target = self.ranges[index], to.ranges[index]
            moved.narrow(-1, target.offset, target.numel).copy_(
                buffer.narrow(-1, source.offset, source.numel)
            )
        return moved


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
        """Return ``flat`` in another layout, which has all of its parameters."""
        if self.layout is layout:
            return self.flat
        return self.layout.move(self.flat, layout, self.used)

    def without(self, erased: frozenset[int]) -> FlatGradients | None:
        """Remove the gradients of some parameters, in place.

        Returns:
            What is left; None if ``erased`` are all, used here or not.
        """
        for index in self.used & erased:
            param_range = self.layout.ranges[index]
            self.flat.narrow(-1, param_range.offset, param_range.numel).fill_(-0.0)
        if erased.issuperset(self.layout.indices):
            return None
        return self._replace(used=self.used - erased)
