"""Exchange of matrices between the ranks that hold their shards and the rank that steps each.

A matrix has one *owner* among the ranks of its mesh. On the way in, ranks send their shards to the
owner, which puts the unsharded matrix together. On the way out the owner sends every rank its
shard. One all-to-all serves many matrices of one dtype. Ranks with equal shards belong to different
replicas, and on the way in only the ranks of the owner's replica send.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshard._comm.communicator import CommStream, Communicator, Exchanging
from meshard._mesh.boxes import Box, box_at, coordinates
from meshard._mesh.mesh_info import device_of, ranks_of_whole_mesh, whole_mesh_pg
from meshard._torch.private import foreach_copy_


class MeshRanks:
    """The ranks of a mesh as one process group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.device = device_of(mesh)
        places = dict(coordinates(mesh))
        # Global ranks in the order of the group, and their positions on the axes of the mesh.
        self.ranks = ranks_of_whole_mesh(mesh)
        self.places = [places[rank] for rank in self.ranks]
        self.own = self.ranks.index(dist.get_rank())

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """The group. **Collective:** all ranks of the mesh, the first time, to make it."""
        return whole_mesh_pg(self.mesh)


class Layout(NamedTuple):
    """How a tensor lies on the ranks of a mesh. Without placements every rank has all of it."""

    shape: torch.Size
    placements: tuple[Placement, ...] | None

    @classmethod
    def of_param(cls, param: torch.Tensor) -> Layout:
        """Return the layout of a parameter, and of all state that has its shape."""
        return cls(param.shape, tuple(param.placements) if isinstance(param, DTensor) else None)

    def of_state(self, shape: torch.Size) -> Layout:
        """Return the layout of state of another shape: cut along dim 0 by the same axes."""
        if shape == self.shape or self.placements is None:
            return Layout(shape, self.placements)
        return Layout(
            shape,
            tuple(Replicate() if each == Replicate() else Shard(0) for each in self.placements),
        )

    def box_of(self, ranks: MeshRanks, rank: int) -> Box:
        """Return the part that a rank of the group holds."""
        if self.placements is None:
            return Box.of_all(self.shape)
        return box_at(self.shape, ranks.mesh, self.placements, ranks.places[rank])

    def replica_of(self, ranks: MeshRanks, rank: int) -> tuple[int, ...]:
        """Return the replica of a rank: its position on the axes that do not cut the tensor."""
        if self.placements is None:
            return ranks.places[rank]
        pairs = zip(self.placements, ranks.places[rank], strict=True)
        return tuple(position for placement, position in pairs if placement == Replicate())

    def num_replicas(self, ranks: MeshRanks) -> int:
        """Return how many ranks hold the same shard."""
        return math.prod(
            size
            for axis, size in enumerate(ranks.mesh.shape)
            if self.placements is None or self.placements[axis] == Replicate()
        )


class _Piece(NamedTuple):
    """A part of one tensor that one rank sends to another."""

    number: int  # of the tensor, among those of the route
    box: Box  # where it lies in the whole tensor


# A function that returns tensor number n of a route. For one end of the route these are the whole
# tensors that this rank owns, for the other this rank's shards of all tensors.
TensorOf = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Route:
    """What this rank sends to and receives from each rank, for some tensors of one dtype."""

    sent: list[list[_Piece]]  # by rank of the group
    received: list[list[_Piece]]
    numel: int  # of what all ranks send together, to themselves too
    to_owners: bool

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        owners: Sequence[int],  # ranks of the group
        ranks: MeshRanks,
        *,
        to_owners: bool,
    ) -> Route:
        """Return the way of shards to the owners of the tensors, or from them to all ranks."""
        by_owner: list[list[_Piece]] = [[] for _ in ranks.places]
        by_holder: list[list[_Piece]] = [[] for _ in ranks.places]  # those that this rank owns
        numel = 0
        for number, (layout, owner) in enumerate(zip(layouts, owners, strict=True)):
            numel += layout.shape.numel() * (1 if to_owners else layout.num_replicas(ranks))
            for rank in range(len(ranks.places)) if owner == ranks.own else (ranks.own,):
                piece = _Piece(number, layout.box_of(ranks, rank))
                if not piece.box.numel:
                    continue
                if to_owners and layout.replica_of(ranks, rank) != layout.replica_of(ranks, owner):
                    continue
                if owner == ranks.own:
                    by_holder[rank].append(piece)
                if rank == ranks.own:
                    by_owner[owner].append(piece)
        sent, received = (by_owner, by_holder) if to_owners else (by_holder, by_owner)
        return cls(sent, received, numel, to_owners)

    def start(
        self,
        source: TensorOf,
        target: TensorOf,
        dtype: torch.dtype,
        ranks: MeshRanks,
        comm: Communicator,
        label: str,
    ) -> ExchangeInFlight:
        """Send pieces of ``source``, in ``dtype``; ``finish`` writes what arrives to ``target``.

        **Collective:** all ranks of the mesh.
        """
        sizes = [_numel(pieces) for pieces in self.sent]
        flat = torch.empty(sum(sizes), dtype=dtype, device=ranks.device)
        views = _views(self.sent, source, are_whole=not self.to_owners)
        if views:
            foreach_copy_(_ranges(flat, views), views)
        with comm.on_stream(CommStream.OPTIMIZER):
            exchanging = comm.all_to_all(
                flat,
                sizes,
                [_numel(pieces) for pieces in self.received],
                numel=self.numel,
                group=ranks.group,
                label=label,
            )
        return ExchangeInFlight(self, exchanging, target)


class ExchangeInFlight(NamedTuple):
    """An exchange that has been started."""

    route: Route
    exchanging: Exchanging
    target: TensorOf

    def finish(self) -> None:
        """Wait, and write what was received to the tensors."""
        self.exchanging.pending.wait()
        views = _views(self.route.received, self.target, are_whole=self.route.to_owners)
        if views:
            foreach_copy_(views, _ranges(self.exchanging.received, views))

    def abandon(self) -> None:
        """Give up the result after an error."""
        self.exchanging.pending.abandon()


def _numel(pieces: list[_Piece]) -> int:
    return sum(piece.box.numel for piece in pieces)


def _views(
    pieces: list[list[_Piece]], tensor_of: TensorOf, *, are_whole: bool
) -> list[torch.Tensor]:
    """Return a tensor per piece, rank by rank: a part of a whole tensor, or this rank's shard."""
    flat = [piece for of_rank in pieces for piece in of_rank]
    tensors = [tensor_of(piece.number) for piece in flat]
    if not are_whole:
        return tensors
    return [tensor[piece.box.slices] for tensor, piece in zip(tensors, flat, strict=True)]


def _ranges(flat: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Cut ``flat`` into consecutive ranges, one of the size and the shape of each view."""
    parts = flat.split([view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]
