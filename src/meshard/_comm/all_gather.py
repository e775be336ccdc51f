"""All-gather of a unit's parameters.

A ``GatherPlan`` is made once per unit: which ranges to cast, and where the range of each rank goes
in each unsharded parameter. ``PackedGather`` gathers the tensors of subclasses with a custom
all-gather (float8, int8) as bytes.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.blocking import gather_from_all
from meshard._comm.buffers import matching_parts
from meshard._comm.communicator import CommStream, Communicator, Gathered, GatherInFlight, Rows
from meshard._mesh.layout import FlatLayout, ParamRange
from meshard._torch.private import foreach_copy_

_TINY = 2**14  # bytes: malloc does not return such a small block to the OS


class _CastRange(NamedTuple):
    """What is contiguous in the flat shard and in the shard that is sent."""

    from_segment: int
    from_offset: int
    to_segment: int
    to_offset: int
    numel: int

    @property
    def end(self) -> tuple[int, int, int, int]:
        """Where a range that may be merged with this one begins."""
        end = self.from_offset + self.numel
        return self.from_segment, end, self.to_segment, self.to_offset + self.numel


def start_all_gather(
    source: torch.Tensor, *, comm: Communicator, group: dist.ProcessGroup, label: str
) -> Gathered:
    """Start gathering ``source [n]`` of every rank, on the gather stream, into ``[ranks, n]``."""
    count, dtype, device = group.size(), source.dtype, source.device
    flat = comm.allocate(
        count * source.numel(), CommStream.GATHER, dtype=dtype, device=device, group=group
    )
    pending = comm.all_gather(flat, source, group=group, label=label)
    return Gathered(flat.view(count, -1), pending, source)


class _Kept(NamedTuple):
    """Memory that all gathers of a unit are received in: faster than new tensors in each step."""

    flat: torch.Tensor
    rows: torch.Tensor  # the same, [ranks, n]
    allocate: Callable[[], object] | None  # None: it always has memory
    free: Callable[[], None] | None = None


class _Copies(NamedTuple):
    """Pairs of tensors of the same shape."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]


class GatherPlan:
    """How one unit is cast, gathered and copied into unsharded parameters.

    ``at_rest`` is the layout of the flat shard, ``on_wire`` that in the dtypes of the compute.
    """

    def __init__(self, at_rest: FlatLayout, on_wire: FlatLayout) -> None:
        self.on_wire = on_wire
        self._casts = at_rest.segments != on_wire.segments
        self._cast_ranges = _cast_ranges(at_rest, on_wire) if self._casts else []
        self._regular_ranges = [
            (segment.regular_sizes, segment.regular_numel) for segment in on_wire.segments
        ]
        self._irregular_ranges = [
            (position, param_range)
            for position, segment in enumerate(on_wire.segments)
            for param_range in segment.ranges[segment.num_regular :]
        ]

    def bind(
        self, unsharded: Sequence[torch.Tensor], allocate: Callable[[], None] | None = None
    ) -> None:
        """Prepare to fill unsharded parameters; those of one dtype share one storage.

        ``allocate`` allocates their memory. With it, the gather of a unit of one parameter that is
        cut evenly is received there: nothing has to be copied out.
        """
        self._unsharded = list(unsharded)
        self._regular = [
            [
                unsharded[each.index].view(unsharded[each.index].numel() // each.numel, -1)
                for each in segment.ranges[: segment.num_regular]
            ]
            for segment in self.on_wire.segments
        ]
        self._regular_by_rank: list[list[list[torch.Tensor]]] = []
        self._kept: _Kept | None = None
        self._segments: Sequence[torch.Tensor] = ()  # of what is kept
        self._copies: _Copies | None = None
        if allocate is not None and len(unsharded) == 1 and self._regular[0]:
            flat = unsharded[0].view(-1)
            rows = flat.view(-1, self.on_wire.segments[0].numel)
            self._kept, self._copies = _Kept(flat, rows, allocate), _Copies([], [])

    def start(
        self,
        buffer: torch.Tensor,
        segments: Sequence[torch.Tensor],
        *,
        comm: Communicator,
        group: dist.ProcessGroup,
        label: str,
    ) -> GatherInFlight:
        """Start gathering the unit; its shard must not be edited until the gather is waited for."""
        with comm.on_stream(CommStream.GATHER):
            source = self._cast(buffer, segments, comm, group) if self._casts else buffer
            views = comm.gather_views(source, group=group, label=label)
            if views is not None:
                return views
            if not comm.may_keep_buffers:
                return start_all_gather(source, comm=comm, group=group, label=label)
            if self._kept is None:
                self._keep(source, group.size())
            kept = self._kept
            assert kept is not None
            if kept.allocate is not None:
                kept.allocate()
            pending = comm.all_gather(kept.flat, source, group=group, label=label)
            return Gathered(kept.rows, pending, source, kept.free)

    def _cast(
        self,
        buffer: torch.Tensor,
        segments: Sequence[torch.Tensor],
        comm: Communicator,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        numel, dtype = self.on_wire.shard_form
        source = comm.allocate_source(numel, dtype, device=buffer.device, group=group)
        views = self.on_wire.split(source)
        for each in self._cast_ranges:
            target = views[each.to_segment].narrow(0, each.to_offset, each.numel)
            target.copy_(segments[each.from_segment].narrow(0, each.from_offset, each.numel))
        return source

    def _keep(self, source: torch.Tensor, count: int) -> None:
        with torch.inference_mode(False):  # a module may run under it first and train later
            flat = source.new_empty(count * source.numel())
            rows = flat.view(count, -1)
            self._segments = self.on_wire.split(rows)
        storage = flat.untyped_storage()
        num_bytes, resize = storage.nbytes(), storage.resize_
        self._kept = _Kept(flat, rows, None)
        if num_bytes > _TINY:
            resize(0)
            self._kept = _Kept(flat, rows, partial(resize, num_bytes), partial(resize, 0))

    def _make_copies(self) -> _Copies:
        """Prepare copies out of ``_segments``: one for all adjacent parameters of one size."""
        copies = _Copies([], [])
        for part, segment, unsharded in zip(
            self._segments, self.on_wire.segments, self._regular, strict=True
        ):
            sizes = segment.regular_sizes
            for numel, run in itertools.groupby(range(len(sizes)), sizes.__getitem__):
                positions = list(run)
                same, count = [unsharded[position] for position in positions], len(positions)
                taken = part.narrow(1, segment.ranges[positions[0]].offset, count * numel)
                taken = taken.unflatten(1, (count, numel))
                gap = _gap_between(same)
                if gap is None:
                    copies.targets.extend(same)
                    copies.sources.extend(taken.unbind(1))
                else:
                    size, stride = (count, *same[0].shape), (gap, *same[0].stride())
                    copies.targets.append(same[0].as_strided(size, stride))
                    copies.sources.append(taken.transpose(0, 1))
        return copies

    def copy_out(self, gathered: Rows) -> None:
        """Fill the bound parameters from ``gathered [shard_count, ...]``, skipping padding."""
        if isinstance(gathered, list):
            self._copy_rows_out(gathered)
            return
        if self._kept is not None and gathered is self._kept.rows:
            segments = self._segments
            if self._copies is None:  # not earlier: the parameters have no memory
                self._copies = self._make_copies()
            if len(self._copies.targets) == 1:  # half the time of the foreach operator
                self._copies.targets[0].copy_(self._copies.sources[0])
            elif self._copies.targets:
                foreach_copy_(*self._copies)
        else:
            segments = self.on_wire.split(gathered)
            self._take_apart(segments, self._regular)
        for position, each in self._irregular_ranges:
            self._fill_irregular(each, segments[position].narrow(1, each.offset, each.numel))

    def _copy_rows_out(self, rows: list[torch.Tensor]) -> None:
        if not self._regular_by_rank:
            self._regular_by_rank = [
                [[view[rank] for view in views] for views in self._regular]
                for rank in range(len(rows))
            ]
        by_rank = [self.on_wire.split(row) for row in rows]
        for segments, targets in zip(by_rank, self._regular_by_rank, strict=True):
            self._take_apart(segments, targets)
        for position, each in self._irregular_ranges:
            ranges = [rank[position].narrow(0, each.offset, each.numel) for rank in by_rank]
            self._fill_irregular(each, torch.stack(ranges))

    def _take_apart(
        self, segments: Sequence[torch.Tensor], targets: list[list[torch.Tensor]]
    ) -> None:
        """Copy the regular ranges of each segment ``[..., n]`` to its targets."""
        for part, (sizes, numel), out in zip(segments, self._regular_ranges, targets, strict=True):
            if sizes:
                regular = part if numel == part.size(-1) else part.narrow(-1, 0, numel)
                torch.split_with_sizes_copy(regular, sizes, dim=-1, out=out)

    def _fill_irregular(self, param_range: ParamRange, ranges: torch.Tensor) -> None:
        layout = self.on_wire.params[param_range.index]
        for ours, theirs in matching_parts(ranges, self._unsharded[param_range.index], layout):
            theirs.copy_(ours)


def _gap_between(views: Sequence[torch.Tensor]) -> int | None:
    """Return the distance between views of one storage, in elements; None: uneven, or one view."""
    offsets = [int(view.storage_offset()) for view in views]
    gaps = {after - before for before, after in itertools.pairwise(offsets)}
    return gaps.pop() if len(gaps) == 1 else None


def _cast_ranges(at_rest: FlatLayout, on_wire: FlatLayout) -> list[_CastRange]:
    """Pair the ranges of both layouts, merging those that are adjacent in both."""
    target = {
        param_range.index: (position, param_range.offset)
        for position, segment in enumerate(on_wire.segments)
        for param_range in segment.ranges
    }
    ranges: list[_CastRange] = []
    for position, segment in enumerate(at_rest.segments):
        for each in segment.ranges:
            new = _CastRange(position, each.offset, *target[each.index], each.numel)
            if ranges and ranges[-1].end == new[:4]:
                ranges[-1] = ranges[-1]._replace(numel=ranges[-1].numel + new.numel)
            else:
                ranges.append(new)
    return ranges


class Form(NamedTuple):
    """dtype and shape of what every rank sends of one tensor."""

    dtype: torch.dtype
    rows: int
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of ``tensor``; a tensor without dims is one row."""
        return cls(tensor.dtype, tensor.shape[0] if tensor.dim() else 1, tuple(tensor.shape[1:]))

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank."""
        return self.rows * math.prod(self.row_shape) * self.dtype.itemsize


def agree_on_forms(
    own: Sequence[Form], group: dist.ProcessGroup, *, device: torch.device, label: str
) -> list[Form]:
    """Return the forms with the largest number of rows of any rank.

    **Collective:** all ranks of ``group``; two small all-gathers, which block. All ranks raise a
    RuntimeError if their forms differ in more than the number of rows.
    """
    text = "\n".join(f"{form.dtype} {form.row_shape}" for form in own)
    outline = torch.tensor([len(own), zlib.crc32(text.encode())], device=device)
    outlines = gather_from_all(outline, group, label=label)
    if not bool((outlines == outlines[0]).all()):
        raise RuntimeError(
            f"unit {label!r} cannot be gathered: fsdp_pre_all_gather returned {own} on this rank, "
            "and other dtypes, row shapes or numbers of tensors on another. Only the size of dim 0 "
            "may be smaller on ranks that own fewer rows."
        )
    if not own:
        return []
    rows = torch.tensor([form.rows for form in own], device=device)
    most = gather_from_all(rows, group, label=label).amax(dim=0).tolist()
    return [form._replace(rows=int(rows)) for form, rows in zip(own, most, strict=True)]


class PackedGather:
    """A gather of several tensors as bytes, packed one behind the other.

    The outputs are laid out rank by rank along dim 0. Their memory is freed by resizing it, so
    tensors that wrap them are filled again by the next gather.
    """

    def __init__(self, forms: Sequence[Form], count: int, device: torch.device) -> None:
        self.forms = list(forms)
        self._sizes = [form.num_bytes for form in forms]
        self._bytes = [
            torch.empty((count, size), dtype=torch.uint8, device=device) for size in self._sizes
        ]
        # `.data` has a version counter of its own: autograd does not take the next filling for an
        # in-place change of what it saved.
        self.outputs = [
            flat.view(-1).view(form.dtype).view(count * form.rows, *form.row_shape).data
            for flat, form in zip(self._bytes, forms, strict=True)
        ]
        self._storages = [flat.untyped_storage() for flat in self._bytes]
        self.free()

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what this rank sends; missing rows are padded with zeros."""
        parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors]
        if len(parts) == 1 and parts[0].numel() == self._sizes[0]:
            return parts[0]
        source = parts[0].new_empty(sum(self._sizes))
        for target, part in zip(source.split(self._sizes), parts, strict=True):
            target[: part.numel()].copy_(part)
            target[part.numel() :].zero_()
        return source

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Fill the outputs, which have memory, from ``gathered [ranks, bytes]``."""
        torch.split_with_sizes_copy(gathered, self._sizes, dim=1, out=self._bytes)

    def allocate(self) -> None:
        """Allocate the memory of the outputs."""
        for flat, storage in zip(self._bytes, self._storages, strict=True):
            storage.resize_(flat.numel())

    def free(self, indices: Iterable[int] | None = None) -> None:
        """Free the memory of the outputs, or of some."""
        for index in range(len(self._storages)) if indices is None else indices:
            self._storages[index].resize_(0)
