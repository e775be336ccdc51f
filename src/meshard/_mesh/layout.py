"""Layout of parameters in a flat shard.

A parameter of shape ``[prefix..., rows, suffix...]`` is sharded along its shard dim into
``shard_count`` chunks of ``chunk_rows = ceil(rows / shard_count)`` rows, like ``torch.chunk``: the
last ranks may own fewer rows, or none. In the flat shard of every rank the parameter has a
**range** of the size of a full chunk. If the rank owns less, the rest of the range is padding: no
parameter gets these values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# Ranks send and receive multiples of this. NCCL has a slow path for what is misaligned
# (pytorch#195450, nccl#413).
ROW_BYTES = 16


def padded(numel: int, multiple: int) -> int:
    """Return the least multiple that is not below ``numel``.

    >>> padded(17, 16)
    32
    """
    return math.ceil(numel / multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """The shape of one parameter, and how its shard dim is cut into chunks of rows."""

    shape: torch.Size
    shard_dim: int
    shard_count: int

    @property
    def rows(self) -> int:
        return self.shape[self.shard_dim]

    @property
    def chunk_rows(self) -> int:
        return math.ceil(self.rows / self.shard_count)

    @property
    def prefix(self) -> int:
        return math.prod(self.shape[: self.shard_dim])

    @property
    def suffix(self) -> int:
        return math.prod(self.shape[self.shard_dim + 1 :])

    @property
    def numel(self) -> int:
        return self.prefix * self.rows * self.suffix

    @property
    def range_numel(self) -> int:
        """Elements of a full chunk, and so of the range on every rank."""
        return self.prefix * self.chunk_rows * self.suffix

    @property
    def full_chunks(self) -> int:
        """How many ranks own a full chunk: the first ones."""
        return self.rows // self.chunk_rows if self.rows else 0

    @property
    def is_regular(self) -> bool:
        """Whether the ranges of all ranks, concatenated, are the contiguous parameter."""
        return self.prefix == 1 and self.numel > 0 and self.rows % self.shard_count == 0

    def owned_rows(self, shard_rank: int) -> range:
        """Return the rows that ``shard_rank`` owns.

        >>> ParamLayout(torch.Size([7, 2]), 0, 3).owned_rows(2)
        range(6, 7)
        """
        if not 0 <= shard_rank < self.shard_count:
            raise ValueError(f"shard_rank must be in [0, {self.shard_count}), got {shard_rank}.")
        start = min(shard_rank * self.chunk_rows, self.rows)
        return range(start, min(start + self.chunk_rows, self.rows))

    def own_part(self, unsharded: torch.Tensor, shard_rank: int) -> torch.Tensor:
        rows = self.owned_rows(shard_rank)
        return unsharded.narrow(self.shard_dim, rows.start, len(rows))

    def local_shape(self, shard_rank: int) -> torch.Size:
        shape = list(self.shape)
        shape[self.shard_dim] = len(self.owned_rows(shard_rank))
        return torch.Size(shape)


def matching_parts(
    ranges: torch.Tensor, unsharded: torch.Tensor, layout: ParamLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of views, one of ``ranges`` and one of ``unsharded``, to copy between.

    There are at most two pairs: one for all full chunks, and one for the chunk of the rank that
    owns fewer rows. ``ranges`` is ``[shard_count, range_numel]``. ``unsharded`` may have any
    strides if it is only read.
    """
    parts = []
    chunk, full = layout.chunk_rows, layout.full_chunks
    # reshape returns a view of a contiguous tensor, as unsharded parameters are. It may copy other
    # tensors, such as gradients, which are only read.
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


@dataclass(frozen=True, slots=True)
class ParamRange:
    """The range of one parameter in a flat shard."""

    index: int  # of the parameter in the unit
    offset: int  # in elements, from the start of its segment
    numel: int  # ParamLayout.range_numel


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a flat shard that has one dtype. Sizes are those on one rank."""

    dtype: torch.dtype
    byte_offset: int
    ranges: tuple[ParamRange, ...]

    @property
    def numel(self) -> int:
        return self.ranges[-1].offset + self.ranges[-1].numel if self.ranges else 0

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The ranges of all parameters of a unit in one flat buffer per rank.

    The buffer has one segment per dtype, wider dtypes first, so that every segment is aligned
    without padding between them. ``shard_bytes`` is what one rank sends to gather the unit.
    """

    params: tuple[ParamLayout, ...]
    segments: tuple[Segment, ...]

    @classmethod
    def build(
        cls,
        params: Sequence[ParamLayout],
        dtypes: Sequence[torch.dtype],
        order: Iterable[int] | None = None,
    ) -> FlatLayout:
        """Lay out the parameters ``order`` (by default all of them), one segment per dtype."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in order if order is not None else range(len(params)):
            by_dtype.setdefault(dtypes[index], []).append(index)
        segments: list[Segment] = []
        byte_offset = 0
        for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize):
            indices = by_dtype[dtype]
            sizes = [params[index].range_numel for index in indices]
            offsets = itertools.accumulate(sizes, initial=0)
            ranges = tuple(map(ParamRange, indices, offsets, sizes))
            segments.append(Segment(dtype, byte_offset, ranges))
            byte_offset += segments[-1].num_bytes
        return cls(tuple(params), tuple(segments))

    @property
    def is_of_bytes(self) -> bool:
        """Whether buffers are of bytes (uint8), and not of the dtype that all parameters have.

        A buffer for several dtypes is of bytes. So is one for a single dtype, unless that is a
        float of 16 bits or more: gloo sends neither int16 nor float8.
        """
        dtypes = [segment.dtype for segment in self.segments]
        return len(dtypes) != 1 or not dtypes[0].is_floating_point or dtypes[0].itemsize == 1

    @property
    def order(self) -> list[int]:
        return [param_range.index for segment in self.segments for param_range in segment.ranges]

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's flat shard, which is padded at its end."""
        num_bytes = sum(segment.num_bytes for segment in self.segments)
        widest = self.segments[0].dtype.itemsize if self.segments else 1
        is_alone = self.params[0].shard_count == 1 if self.params else True
        return padded(num_bytes, widest if is_alone else ROW_BYTES)

    @property
    def shard_form(self) -> tuple[int, torch.dtype]:
        """Elements and dtype of the buffer of one rank's flat shard."""
        dtype = torch.uint8 if self.is_of_bytes else self.segments[0].dtype
        return self.shard_bytes // dtype.itemsize, dtype

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return one typed view ``[..., segment.numel]`` per segment of a buffer."""
        if not self.is_of_bytes:
            return [buffer.narrow(-1, 0, self.segments[0].numel)]
        return [
            # torch views bytes in a wider dtype only if the offset and the strides are multiples of
            # its size, even if the range is empty: a buffer ``[2, 6]`` has no view in float32. So
            # an empty segment gets a new tensor.
            buffer.narrow(-1, segment.byte_offset, segment.num_bytes).view(segment.dtype)
            if segment.num_bytes
            else buffer.new_empty((*buffer.shape[:-1], 0), dtype=segment.dtype)
            for segment in self.segments
        ]
