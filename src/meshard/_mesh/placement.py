"""Placement of parameters that are DTensors of another parallelism.

Tensor parallelism shards a parameter first; the local tensor is then sharded again over the shard
axis. Unsharded, the parameter has the placements that its user gave it. Sharded, it is a DTensor
over the data-parallel axes and the others together. torch reads the placements of a DTensor from
left to right: the leftmost axis cuts the tensor first. But a shard axis to the left of tensor
parallelism must cut after it. So if both cut the same tensor dim, the placement on the shard axis
is a ``_StridedShard``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshard._mesh.layout import ParamLayout
from meshard._mesh.mesh_info import MeshInfo, joined_mesh
from meshard._torch.private import strided_shard


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPlacement:
    """Mesh and placements of a tensor of global ``shape``."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class MissingSum:
    """A sum (or mean) over mesh axes that DTensor has not yet computed for a gradient.

    Gradients that lack the same sum may be packed into one tensor, and added up together.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # Partial on the axes to sum over, Replicate on others

    def add_up(self, local: torch.Tensor) -> torch.Tensor:
        """Sum ``local``, which may have any shape, over the axes. **Collective:** their ranks."""
        partial = DTensor.from_local(local, self.mesh, self.placements, run_check=False)
        return partial.redistribute(placements=[Replicate()] * self.mesh.ndim).to_local()


@dataclass(frozen=True, slots=True, eq=False)
class DTensorPlacement:
    """The placements of a DTensor parameter, sharded and unsharded."""

    in_use: GlobalPlacement  # of the unsharded parameter, as users placed it
    mesh: DeviceMesh  # of the sharded parameter
    # For each axis of ``mesh``, the placement that users chose; None on data-parallel axes, which
    # are in the order of the data-parallel mesh.
    others: tuple[Placement | None, ...]
    # The axes of ``in_use.mesh`` that are data-parallel: a gradient may be a partial sum there.
    data_axes: frozenset[int]

    def while_sharded(self, data_placements: Sequence[Placement]) -> GlobalPlacement:
        """Return the placements of the sharded parameter, given those on data-parallel axes."""
        of_data = iter(data_placements)
        placements = tuple(
            self._after_others(axis, next(of_data)) if other is None else other
            for axis, other in enumerate(self.others)
        )
        return GlobalPlacement(self.mesh, placements, self.in_use.shape)

    def _after_others(self, axis: int, placement: Placement) -> Placement:
        """Return ``placement`` on ``axis``, changed to cut after the axes to the right of it."""
        if not isinstance(placement, Shard):
            return placement
        cuts = math.prod(
            self.mesh.size(other)
            for other in range(axis + 1, self.mesh.ndim)
            if self.others[other] == placement
        )
        return placement if cuts == 1 else strided_shard(placement.dim, split_factor=cuts)

    def cut(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``unsharded``, a plain tensor of the global shape: a view."""
        coordinate = self.in_use.mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(self.in_use.placements):
            if isinstance(placement, Shard):
                count = self.in_use.mesh.size(axis)
                layout = ParamLayout(unsharded.shape, placement.dim, count)
                unsharded = layout.own_part(unsharded, coordinate[axis])
        return unsharded

    def of_gradient(self, arrived: Sequence[Placement]) -> tuple[Placement, ...] | None:
        """Return the placements in which to reduce a gradient that has the placements ``arrived``.

        On data-parallel axes these are ``arrived``, on the others those of the parameter. Returns
        None if the gradient is sharded along a data-parallel axis, and so cannot be reduced.
        """
        if any(not isinstance(arrived[axis], (Replicate, Partial)) for axis in self.data_axes):
            return None
        return tuple(
            arrived[axis] if axis in self.data_axes else placement
            for axis, placement in enumerate(self.in_use.placements)
        )

    def missing_sum(self, arrived: Sequence[Placement]) -> MissingSum | None:
        """Return the sum that a gradient with the placements ``arrived`` still lacks.

        Returns None if it lacks nothing, or if its placements must change in other ways too.
        """
        target = self.of_gradient(arrived)
        if target is None or target == tuple(arrived):
            return None
        missing = []
        for came, wanted in zip(arrived, target, strict=True):
            # Not isinstance: subclasses of Partial, for masks and norms, need more than a sum.
            is_sum = type(came) is Partial and came.reduce_op in ("sum", "avg")
            if came != wanted and not (is_sum and wanted == Replicate()):
                return None
            missing.append(Replicate() if came == wanted else came)
        return MissingSum(self.in_use.mesh, tuple(missing))


def _check_composable(placed: GlobalPlacement, mesh_info: MeshInfo) -> None:
    """Raise a ValueError if a DTensor parameter cannot be sharded again."""
    mesh, full = placed.mesh, mesh_info.full
    for axis, placement in enumerate(placed.placements):
        # Not isinstance: a subclass of Shard may place elements in another way.
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
        if placed.placements[axis] != Replicate():
            names = mesh.mesh_dim_names or ()
            raise ValueError(
                f"it has placement {placed.placements[axis]} on the data-parallel axis "
                f"{names[axis]!r} of {mesh}; it must be Replicate() there, because fully_shard is "
                "what shards over that axis."
            )


def compose_placement(param: DTensor, mesh_info: MeshInfo) -> DTensorPlacement:
    """Return the placements of a DTensor parameter once it is sharded, or raise a ValueError."""
    placed = GlobalPlacement(param.device_mesh, tuple(param.placements), param.shape)
    _check_composable(placed, mesh_info)
    full = mesh_info.full
    if full is None:
        mesh = joined_mesh([mesh_info.mesh, placed.mesh])
        others = (*[None] * mesh_info.mesh.ndim, *placed.placements)
        return DTensorPlacement(placed, mesh, others, data_axes=frozenset())
    return DTensorPlacement(
        placed,
        full.flattened,
        tuple(None if origin is None else placed.placements[origin] for origin in full.origins),
        full.data_axes,
    )
