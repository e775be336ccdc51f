"""All-gather of a unit's parameters.

A *range* holds the elements of one parameter in a flat shard. The ``GatherPlan`` of a unit says
which ranges are cast before they are sent, and where each gathered range is copied to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommStream, Communicator, GatherInFlight, ReceiveMemory, Rows
from meshard._mesh.layout import FlatLayout, matching_parts
from meshard._torch.private import foreach_copy_

_TINY = 2**14  # bytes: buffers up to this size are never freed, as malloc would keep their memory

_Copies = tuple[list[torch.Tensor], list[torch.Tensor]]  # targets, and as many sources


class _CastRange(NamedTuple):
    """Elements that are contiguous both in the flat shard and in the cast copy that is sent."""

    from_segment: int
    from_offset: int
    to_segment: int
    to_offset: int
    numel: int

    @property
    def end(self) -> tuple[int, int, int, int]:
        """Where the next range must begin, in both buffers, to be merged with this one."""
        end = self.from_offset + self.numel
        return self.from_segment, end, self.to_segment, self.to_offset + self.numel


class _Part(NamedTuple):
    """A part of the gathered rows that is copied into an unsharded parameter by one copy."""

    segment: int
    offset: int  # from the start of the segment
    like: torch.Tensor  # on the meta device, with the size and strides of the part
    target: torch.Tensor


class GatherPlan:
    """How one unit is cast, gathered and copied into unsharded parameters.

    ``at_rest`` is the layout of the flat shard. ``on_wire`` is the layout of the buffer that is
    sent: it has the same parameters, in the dtypes in which modules compute.

    A gather fills the tensors ``unsharded``. Those of one dtype share one storage. ``allocate``
    allocates their memory. If it is given, and the unit has a single parameter, which is regular
    (``ParamLayout.is_regular``) and needs no padding, a gather on CPU may receive into the memory
    of this parameter. Then nothing is copied out.
    """

    def __init__(
        self,
        at_rest: FlatLayout,
        on_wire: FlatLayout,
        unsharded: Sequence[torch.Tensor],
        allocate: Callable[[], None] | None = None,
    ) -> None:
        self.on_wire = on_wire
        self._casts = at_rest.segments != on_wire.segments
        self._cast_ranges = _cast_ranges(at_rest, on_wire) if self._casts else []
        self._unsharded = list(unsharded)
        self._regular = [
            [
                unsharded[each.index].view(unsharded[each.index].numel() // each.numel, -1)
                for each in segment.ranges[: segment.num_regular]
            ]
            for segment in on_wire.segments
        ]
        self._irregular = [
            (position, param_range)
            for position, segment in enumerate(on_wire.segments)
            for param_range in segment.ranges[segment.num_regular :]
            if param_range.numel
        ]
        numel, dtype = on_wire.shard_form
        self._out = [view.view(dtype) for views in self._regular for view in views]
        self._out_sizes = [view.size(1) for view in self._out]
        self._padding = 0 if self._irregular else numel - sum(self._out_sizes)
        self._kept: ReceiveMemory | None = None
        self._allocate_kept: Callable[[], object] | None = None  # None: ``_kept`` is never freed
        self._from_kept: _Copies | None = None
        if allocate is not None and len(unsharded) == 1 and self._regular[0] and not self._padding:
            flat = unsharded[0].view(-1).view(dtype)
            rows = flat.view(-1, numel)
            self._kept, self._allocate_kept = ReceiveMemory(flat, rows), allocate
            self._from_kept = [], []

    def start(
        self,
        buffer: torch.Tensor,
        segments: Sequence[torch.Tensor],
        *,
        comm: Communicator,
        group: dist.ProcessGroup,
        label: str,
    ) -> GatherInFlight:
        """Start gathering the unit; its shard must not be edited until the rows are released."""
        with comm.on_stream(CommStream.GATHER):
            source = self._cast(buffer, segments, comm, group) if self._casts else buffer
            return comm.gather(source, group=group, label=label, receive=self._receive)

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

    def _receive(self, source: torch.Tensor, count: int) -> ReceiveMemory:
        if self._kept is None:
            self._kept = self._make_kept(source, count)
        elif self._allocate_kept is not None:
            self._allocate_kept()
        return self._kept

    def _make_kept(self, source: torch.Tensor, count: int) -> ReceiveMemory:
        # Not an inference tensor: a module that first ran under inference_mode may train later.
        with torch.inference_mode(False):
            flat = source.new_empty(count * source.numel())
            rows = flat.view(count, -1)
        storage = flat.untyped_storage()
        num_bytes, resize = storage.nbytes(), storage.resize_
        if num_bytes <= _TINY:
            return ReceiveMemory(flat, rows)
        # ``_receive`` calls this from the second gather on. new_empty above serves the first one.
        self._allocate_kept = functools.partial(resize, num_bytes)
        return ReceiveMemory(flat, rows, free=functools.partial(resize, 0))

    def copy_out(self, rows: Rows) -> None:
        """Copy the gathered ``rows``, without padding, into the tensors ``unsharded``."""
        if self._kept is not None and rows[0] is self._kept.rows:
            if self._from_kept is None:
                self._from_kept = self._copies_from(self._kept.rows)
            _copy(self._from_kept)
        elif len(rows) > 1:
            self._copy_blocks_out(rows)
        elif self._irregular:
            _copy(self._copies_from(rows[0]))
        else:
            self._split(rows[0])

    def _split(self, rows: torch.Tensor) -> None:
        """Copy all ranges, which are regular. On CUDA it is one kernel, if it takes all columns."""
        sizes, out = self._out_sizes, self._out
        if self._padding:
            sizes = [*sizes, self._padding]
            out = [*out, rows.new_empty(rows.size(0), self._padding)]
        torch.split_with_sizes_copy(rows, sizes, dim=1, out=out)

    @functools.cached_property
    def _parts(self) -> list[_Part]:
        numel, dtype = self.on_wire.shard_form
        count = self.on_wire.params[0].shard_count
        rows = torch.empty(count, numel, dtype=dtype, device="meta")
        return [
            _Part(position, int(ours.storage_offset() - part.storage_offset()), ours, theirs)
            for position, part in enumerate(self.on_wire.split(rows))
            for each in self.on_wire.segments[position].ranges
            for ours, theirs in matching_parts(
                part.narrow(1, each.offset, each.numel),
                self._unsharded[each.index],
                self.on_wire.params[each.index],
            )
        ]

    def _copies_from(self, rows: torch.Tensor) -> _Copies:
        """Return the views to copy to, and those to copy from: parts of the gathered ``rows``."""
        segments = self.on_wire.split(rows) if self.on_wire.is_of_bytes else [rows]
        starts = [int(segment.storage_offset()) for segment in segments]
        # as_strided is one call; narrow, view and transpose would take several times as long.
        sources = [
            segments[each.segment].as_strided(
                each.like.size(), each.like.stride(), starts[each.segment] + each.offset
            )
            for each in self._parts
        ]
        return [each.target for each in self._parts], sources

    def _copy_blocks_out(self, rows: Rows) -> None:
        blocks = [self.on_wire.split(block) for block in rows]
        for position, segment in enumerate(self.on_wire.segments):
            targets = [view.chunk(len(rows)) for view in self._regular[position]]
            # The zip is empty if there are no targets.
            for segments, out in zip(blocks, zip(*targets, strict=True), strict=False):
                regular = segments[position].narrow(1, 0, segment.regular_numel)
                torch.split_with_sizes_copy(regular, segment.regular_sizes, dim=1, out=list(out))
        for position, each in self._irregular:
            ranges = [segments[position].narrow(1, each.offset, each.numel) for segments in blocks]
            unsharded, layout = self._unsharded[each.index], self.on_wire.params[each.index]
            for ours, theirs in matching_parts(torch.cat(ranges), unsharded, layout):
                theirs.copy_(ours)


def _copy(copies: _Copies) -> None:
    if copies[0]:
        foreach_copy_(*copies)


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
