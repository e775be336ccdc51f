"""The part of a DTensor that each rank of its mesh holds.

A part is a **box**: a contiguous block ``[offsets, offsets + sizes)`` of the unsharded tensor. The
local tensor has the shape ``sizes``. Boxes follow from the placements, without communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: where it begins in each dim, and how long it is there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts the box out of the unsharded tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)

    def common(self, other: Box) -> Box:
        """Return the intersection of both boxes, which may be empty."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(first + size, second + length)
            for first, size, second, length in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )
        return Box(begins, tuple(max(0, end - b) for b, end in zip(begins, ends, strict=True)))

    def relative_to(self, offsets: Sequence[int]) -> Box:
        """Return the same box with its offsets relative to ``offsets``."""
        moved = (own - other for own, other in zip(self.offsets, offsets, strict=True))
        return Box(tuple(moved), self.sizes)

    @classmethod
    def of_all(cls, shape: Sequence[int]) -> Box:
        """Return the box that is the whole tensor."""
        return cls((0,) * len(shape), tuple(shape))


def box_at(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """Return the box that the rank at ``coordinate`` holds of a tensor of ``shape``.

    ``coordinate`` is the position on each axis of ``mesh``. No placement may be a partial sum.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for axis in _axes_in_order(mesh, placements):
        dim = _dim(placements[axis])
        chunk = math.ceil(sizes[dim] / mesh.size(axis))
        start = min(chunk * coordinate[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def _axes_in_order(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """Return the axes that cut a tensor, in the order in which they cut it.

    Axes cut from left to right, except those with a strided placement. Such an axis cuts after
    those axes to its right that cut the same dim into ``split_factor`` parts.
    """
    order: list[int] = []
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if placement == Replicate():
            continue
        factor = getattr(placement, "split_factor", 1)  # only strided placements have the attribute
        same_dim = [other for other in order if _dim(placements[other]) == _dim(placement)]
        cuts = itertools.accumulate(map(mesh.size, same_dim), lambda a, b: a * b)
        before = next((n for n, product in enumerate(cuts, 1) if product == factor), 0)
        position = order.index(same_dim[before - 1]) + 1 if factor > 1 and before else 0
        order.insert(position, axis)
    return order


def _dim(placement: Placement) -> int:
    dim: int = placement.dim  # type: ignore[attr-defined]  # not Replicate
    return dim


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's position on each axis."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # modules hold DTensors only on meshes that have this rank
    return tuple(coordinate)


def coordinates(mesh: DeviceMesh) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the global rank and the coordinate of each rank of a mesh, in its order."""
    places = itertools.product(*(range(mesh.size(axis)) for axis in range(mesh.ndim)))
    return zip(mesh.mesh.flatten().tolist(), places, strict=True)
