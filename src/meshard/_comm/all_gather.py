"""All-gather of a unit's parameters.

A *range* holds the elements of one parameter in a flat shard. The ``GatherPlan`` of a unit says
which ranges are cast before they are sent, and where each gathered range is copied to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.communicator import Communicator, Handle
from meshard._mesh.layout import FlatLayout, matching_parts
from meshard._torch.private import foreach_copy_


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

    ``at_rest`` is the layout of the flat shard. ``on_wire`` is the layout of what is sent: it has
    these parameters, or some of them, in the dtypes in which modules compute. The parameters that
    only ``on_wire`` has are *inputs*: each gather is given the tensors that this rank sends. A
    gather fills the tensors ``unsharded``, which must have memory.
    """

    def __init__(
        self, at_rest: FlatLayout, on_wire: FlatLayout, unsharded: Sequence[torch.Tensor]
    ) -> None:
        self.on_wire = on_wire
        self._casts = at_rest.segments != on_wire.segments
        self._cast_ranges = _cast_ranges(at_rest, on_wire) if self._casts else []
        self._inputs = sorted(
            (param_range.index, position, param_range)
            for position, segment in enumerate(on_wire.segments)
            for param_range in segment.ranges
            if param_range.index >= len(at_rest.params)
        )
        self._unsharded = list(unsharded)
        # If all parameters are regular, one operator copies all columns.
        numel, dtype = on_wire.shard_form
        ranges = [each for segment in on_wire.segments for each in segment.ranges if each.numel]
        self._is_regular = all(on_wire.params[each.index].is_regular for each in ranges)
        if self._is_regular:
            flat = [unsharded[each.index].view(-1).view(dtype) for each in ranges]
            self._out = [each.view(on_wire.params[0].shard_count, -1) for each in flat]
            self._sizes = [each.size(1) for each in self._out]
            self._padding = numel - sum(self._sizes)

    def start(
        self,
        buffer: torch.Tensor,
        segments: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        *,
        comm: Communicator,
        group: dist.ProcessGroup,
        label: str,
    ) -> Handle:
        """Start gathering the unit; its shard must not be edited until the handle is released.

        **Stream:** the current one, which is that for gathers.
        """
        if not self._casts:
            return comm.all_gather(buffer, group=group, label=label)
        numel, dtype = self.on_wire.shard_form
        memory = comm.gather_memory(numel, dtype, device=buffer.device, group=group)
        own = memory[group.rank()]
        self._pack(own, segments, inputs)
        return comm.all_gather(own, group=group, label=label, memory=memory)

    def _pack(
        self,
        own: torch.Tensor,
        segments: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Write what this rank sends to ``own``: its shards, cast, and ``inputs``."""
        views = self.on_wire.split(own)
        for each in self._cast_ranges:
            target = views[each.to_segment].narrow(0, each.to_offset, each.numel)
            target.copy_(segments[each.from_segment].narrow(0, each.from_offset, each.numel))
        for (_, position, param_range), given in zip(self._inputs, inputs, strict=True):
            target = views[position].narrow(0, param_range.offset, param_range.numel)
            # As bytes, because torch cannot copy tensors of all dtypes.
            target, given = _bytes_of(target), _bytes_of(given.detach())
            target[: given.numel()].copy_(given)
            target[given.numel() :].zero_()  # other ranks have more rows

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Copy ``gathered [ranks, n]``, without padding, into the tensors ``unsharded``."""
        if self._is_regular and self._out:
            sizes, out = self._sizes, self._out
            if self._padding:
                sizes = [*sizes, self._padding]
                out = [*out, gathered.new_empty(gathered.size(0), self._padding)]
            torch.split_with_sizes_copy(gathered, sizes, dim=1, out=out)
        elif self._parts:
            foreach_copy_(*self._copies_from(gathered))

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

    def _copies_from(self, rows: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


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
            if each.index not in target:
                continue
            new = _CastRange(position, each.offset, *target[each.index], each.numel)
            if ranges and ranges[-1].end == new[:4]:
                ranges[-1] = ranges[-1]._replace(numel=ranges[-1].numel + new.numel)
            else:
                ranges.append(new)
    return ranges
