"""Placement of parameters that another parallelism has placed.

Tensor parallelism cuts a parameter first; what a rank holds of it is then cut again over the shard
axis, as if it were the whole. In use the parameter lies as it was placed, at rest over the
data-parallel axes and the others together. DTensor reads placements from the left, first axis cut
first. Where an axis further right cuts the same tensor dim, the cut over the shard axis is
therefore a strided one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshard._mesh.layout import ParamLayout
from meshard._mesh.mesh_info import FullMesh, MeshInfo, joined_mesh
from meshard._torch.private import strided_shard


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """How a tensor of global ``shape`` lies over a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size


@dataclass(frozen=True, slots=True, eq=False)
class DTensorPlacement:
    """How a placed parameter lies over its meshes.

    Attributes:
        in_use: As it was placed.
        mesh: Where it lies at rest.
        data_positions: For each axis of ``mesh``, its place among the data-parallel axes, or None.
        others: For each axis of ``mesh``, how it was placed along it; Replicate along
            data-parallel ones.
        data_axes: The data-parallel axes of ``in_use.mesh``: the gradient may be a partial sum
            along them, because it is going to be reduced.
    """

    in_use: PlacedTensor
    mesh: DeviceMesh
    data_positions: tuple[int | None, ...]
    others: tuple[Placement, ...]
    data_axes: frozenset[int]

    def sharded_of_all(self, data_placements: Sequence[Placement]) -> PlacedTensor:
        """Return how a shard lies whose data-parallel axes have these placements."""
        placements = list(self.others)
        for axis, position in enumerate(self.data_positions):
            if position is not None:
                placements[axis] = self._behind(axis, data_placements[position])
        return PlacedTensor(self.mesh, tuple(placements), self.in_use.shape)

    def _behind(self, axis: int, placement: Placement) -> Placement:
        """Return a cut that comes after the cuts of the axes further right."""
        if not isinstance(placement, Shard):
            return placement
        cuts = math.prod(
            self.mesh.size(other)
            for other in range(axis + 1, self.mesh.ndim)
            if self.others[other] == placement
        )
        return placement if cuts == 1 else strided_shard(placement.dim, cuts)

    def cut(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds in use of ``unsharded``, a plain tensor: a view of it."""
        coordinate = self.in_use.mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(self.in_use.placements):
            if isinstance(placement, Shard):
                count = self.in_use.mesh.size(axis)
                layout = ParamLayout(unsharded.shape, placement.dim, count)
                rows = layout.owned_rows(coordinate[axis])
                unsharded = unsharded.narrow(placement.dim, rows.start, len(rows))
        return unsharded

    def of_gradient(self, arrived: Sequence[Placement]) -> tuple[Placement, ...] | None:
        """Return how a gradient with placements ``arrived`` must be placed to be reduced.

        None if it cannot be: it is cut along a data-parallel axis.
        """
        if any(not _is_whole(arrived[axis]) for axis in self.data_axes):
            return None
        return tuple(
            arrived[axis] if axis in self.data_axes else placement
            for axis, placement in enumerate(self.in_use.placements)
        )


def _is_whole(placement: Placement) -> bool:
    return isinstance(placement, (Replicate, Partial))


def check_composable(placed_tensor: PlacedTensor, mesh_info: MeshInfo) -> None:
    """Check that a parameter that lies like ``placed_tensor`` can be cut again over a shard axis.

    Raises:
        ValueError: Why not, and what to do.
    """
    mesh, full = placed_tensor.mesh, mesh_info.full
    for axis, placement in enumerate(placed_tensor.placements):
        # Not isinstance: special shards do not mean what Shard means.
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"it has placement {placement} on axis {axis} of {mesh}; only Shard and Replicate "
                "can be sharded again, so redistribute it before fully_shard."
            )
    if full is None:
        if mesh.device_type != mesh_info.mesh.device_type:
            raise ValueError(
                f"it lies over {mesh}, but the data-parallel mesh is {mesh_info.mesh}; take both "
                "from one mesh."
            )
        return
    if mesh != full.mesh:
        raise ValueError(
            f"it lies over {mesh}, but with dp_mesh_dims it must lie over the mesh that was "
            f"passed, {full.mesh}, or be an ordinary tensor."
        )
    for axis in full.data_axes:
        if placed_tensor.placements[axis] != Replicate():
            names = mesh.mesh_dim_names or ()
            raise ValueError(
                f"it has placement {placed_tensor.placements[axis]} on the data-parallel axis "
                f"{names[axis]!r} of {mesh}; it must be Replicate() there, because fully_shard is "
                "what shards over that axis."
            )


def compose_placement(placed_tensor: PlacedTensor, mesh_info: MeshInfo) -> DTensorPlacement:
    """Return how a parameter that lies like ``placed_tensor`` lies once it is sharded.

    Raises:
        ValueError: The meshes cannot be joined.
    """
    if mesh_info.full is not None:
        return _compose_on_full(placed_tensor, mesh_info.full)
    num_data = mesh_info.mesh.ndim
    return DTensorPlacement(
        in_use=placed_tensor,
        mesh=joined_mesh([mesh_info.mesh, placed_tensor.mesh]),
        data_positions=(*range(num_data), *[None] * placed_tensor.mesh.ndim),
        others=(*[Replicate()] * num_data, *placed_tensor.placements),
        data_axes=frozenset(),
    )


def _compose_on_full(placed_tensor: PlacedTensor, full: FullMesh) -> DTensorPlacement:
    # The data-parallel axes stand in the order of ``mesh_info.mesh``.
    counter = itertools.count()
    is_data = [origin is None or origin in full.data_axes for origin in full.origins]
    return DTensorPlacement(
        in_use=placed_tensor,
        mesh=full.sharded_of_all,
        data_positions=tuple(next(counter) if each else None for each in is_data),
        others=tuple(
            Replicate() if origin is None else placed_tensor.placements[origin]
            for origin in full.origins
        ),
        data_axes=full.data_axes,
    )
