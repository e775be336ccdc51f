"""All-gather of a unit's parameters.

A *range* holds the elements of one parameter in a flat shard. The ``GatherPlan`` of a unit says
which ranges are cast before they are sent, and where each gathered range is copied to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommStream, Communicator, GatherInFlight, ReceiveMemory, Rows
from meshard._mesh.layout import FlatLayout, ParamRange, matching_parts
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


class GatherPlan:
    """How one unit is cast, gathered and copied into unsharded parameters.

    ``at_rest`` is the layout of the flat shard. ``on_wire`` is the layout of the buffer that is
    sent: it has the same parameters, in the dtypes in which modules compute.

    A gather fills the tensors ``unsharded``. Those of one dtype share one storage. ``allocate``
    allocates their memory. If it is given, and the unit has a single parameter, which is regular
    (``ParamLayout.is_regular``), a gather on CPU may receive into the memory of this parameter.
    Then nothing is copied out.
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
        self._regular_ranges = [
            (segment.regular_sizes, segment.regular_numel) for segment in on_wire.segments
        ]
        self._irregular_ranges = [
            (position, param_range)
            for position, segment in enumerate(on_wire.segments)
            for param_range in segment.ranges[segment.num_regular :]
        ]
        self._unsharded = list(unsharded)
        self._regular = [
            [
                unsharded[each.index].view(unsharded[each.index].numel() // each.numel, -1)
                for each in segment.ranges[: segment.num_regular]
            ]
            for segment in on_wire.segments
        ]
        self._regular_of_blocks: dict[int, list[list[list[torch.Tensor]]]] = {}
        self._kept: ReceiveMemory | None = None
        self._kept_segments: list[torch.Tensor] = []  # ``_kept.rows``, split by dtype
        self._allocate_kept: Callable[[], object] | None = None  # None: ``_kept`` is never freed
        self._copies: _Copies | None = None  # from ``_kept`` into the parameters
        if allocate is not None and len(unsharded) == 1 and self._regular[0]:
            numel, dtype = on_wire.shard_form
            flat = unsharded[0].view(-1).view(dtype)
            rows = flat.view(-1, numel)
            self._kept, self._allocate_kept = ReceiveMemory(flat, rows), allocate
            self._copies = [], []

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
            self._kept_segments = self.on_wire.split(rows)
        storage = flat.untyped_storage()
        num_bytes, resize = storage.nbytes(), storage.resize_
        if num_bytes <= _TINY:
            return ReceiveMemory(flat, rows)
        # ``_receive`` calls this from the second gather on. new_empty above serves the first one.
        self._allocate_kept = partial(resize, num_bytes)
        return ReceiveMemory(flat, rows, free=partial(resize, 0))

    def _make_copies(self, parts: Sequence[torch.Tensor]) -> _Copies:
        """Return views to copy between. ``parts`` are the received rows, split by dtype.

        Adjacent parameters of equal size are one copy, if they lie at equal distances in memory.
        """
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for part, segment, unsharded in zip(
            parts, self.on_wire.segments, self._regular, strict=True
        ):
            sizes = segment.regular_sizes
            for numel, run in itertools.groupby(range(len(sizes)), sizes.__getitem__):
                positions = list(run)
                same, count = [unsharded[position] for position in positions], len(positions)
                taken = part.narrow(1, segment.ranges[positions[0]].offset, count * numel)
                taken = taken.unflatten(1, (count, numel))
                gap = _gap_between(same)
                if gap is None:
                    targets.extend(same)
                    sources.extend(taken.unbind(1))
                else:
                    size, stride = (count, *same[0].shape), (gap, *same[0].stride())
                    targets.append(same[0].as_strided(size, stride))
                    sources.append(taken.transpose(0, 1))
        return targets, sources

    def copy_out(self, rows: Rows) -> None:
        """Copy the gathered ``rows``, without padding, into the tensors ``unsharded``."""
        if self._kept is not None and rows[0] is self._kept.rows:
            blocks = [self._kept_segments]
            self._copy_kept_out()
        else:
            blocks = [self.on_wire.split(block) for block in rows]
            for segments, targets in zip(blocks, self._targets_of(rows), strict=True):
                self._take_apart(segments, targets)
        for position, each in self._irregular_ranges:
            parts = [segments[position].narrow(1, each.offset, each.numel) for segments in blocks]
            self._fill_irregular(each, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _copy_kept_out(self) -> None:
        if self._copies is None:  # not made in __init__: as_strided needs the parameters' memory
            self._copies = self._make_copies(self._kept_segments)
        targets, sources = self._copies
        if len(targets) == 1:  # takes half the time of the foreach operator
            targets[0].copy_(sources[0])
        elif targets:
            foreach_copy_(targets, sources)

    def _targets_of(self, rows: Rows) -> list[list[list[torch.Tensor]]]:
        """Return, for each block of rows, the views that it fills: a list for each segment."""
        count = len(rows)
        if count == 1:
            return [self._regular]
        if count not in self._regular_of_blocks:
            split = [[view.chunk(count) for view in views] for views in self._regular]
            self._regular_of_blocks[count] = [
                [[chunks[block] for chunks in views] for views in split] for block in range(count)
            ]
        return self._regular_of_blocks[count]

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
    """Return how many elements lie between the starts of views of one storage.

    None if there is one view, or if the views do not lie at equal distances.
    """
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
