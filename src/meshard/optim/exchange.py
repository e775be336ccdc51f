"""Exchange of matrices between the ranks that hold their shards and the rank that owns each.

On the way in, ranks send their shards to the owner, which puts the unsharded matrix together. On
the way out the owner sends every rank its shard. The tensors of one exchange have one shape and lie
alike on one mesh, so a rank holds the same box of each. Ranks with equal boxes belong to different
replicas, and on the way in only the ranks of the owner's replica send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from meshard._comm.communicator import CommStream, Communicator, Handle
from meshard._mesh.boxes import Box, box_at, coordinates
from meshard._mesh.mesh_info import device_of, ranks_of_whole_mesh, whole_mesh_pg
from meshard._torch.private import foreach_copy_


@dataclass(frozen=True)
class Layout:
    """How tensors of one shape lie on the ranks of a mesh. Lists are in the order of ``ranks``."""

    mesh: DeviceMesh
    shape: torch.Size
    placements: tuple[Placement, ...]

    def of_state(self, shape: torch.Size) -> Layout:
        """Return the layout of state of another shape: cut along dim 0 by the same axes."""
        if shape == self.shape:
            return self
        cut = (Replicate() if each == Replicate() else Shard(0) for each in self.placements)
        return Layout(self.mesh, shape, tuple(cut))

    @functools.cached_property
    def ranks(self) -> list[int]:
        """The global ranks of the mesh."""
        return ranks_of_whole_mesh(self.mesh)

    @functools.cached_property
    def own(self) -> int:
        """The position of this rank."""
        return self.ranks.index(dist.get_rank())

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the tensors that this rank sends."""
        return device_of(self.mesh)

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the mesh. **Collective:** these, the first time, to make it."""
        return whole_mesh_pg(self.mesh)

    @functools.cached_property
    def boxes(self) -> list[Box]:
        """The part that each rank holds."""
        places = dict(coordinates(self.mesh))
        return [box_at(self.shape, self.mesh, self.placements, places[r]) for r in self.ranks]

    @functools.cached_property
    def replicas(self) -> list[tuple[int, ...]]:
        """The replica of each rank: its position on the axes that do not cut."""
        axes = [axis for axis, each in enumerate(self.placements) if each == Replicate()]
        places = dict(coordinates(self.mesh))
        return [tuple(places[rank][axis] for axis in axes) for rank in self.ranks]

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same shard."""
        return len(set(self.replicas))


class InFlight:
    """An exchange that has been started."""

    def __init__(
        self, exchanging: Handle, unpack: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> None:
        self._exchanging: Handle | None = exchanging
        self._unpack = unpack

    def finish(self) -> list[torch.Tensor]:
        """Wait, and return what this rank gets. What was sent and received is freed."""
        assert self._exchanging is not None
        self._exchanging.wait()
        received, self._exchanging = self._exchanging.result, None
        return self._unpack(received)

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up the result if it was not fetched, because of an error."""
        if self._exchanging is not None:
            self._exchanging.release()


def start_to_owners(
    layout: Layout,
    shards: Sequence[Sequence[torch.Tensor]],
    dtypes: tuple[torch.dtype, torch.dtype],
    comm: Communicator,
    label: str,
) -> InFlight:
    """Send this rank's ``shards``, listed by owner; ``finish`` returns what this rank owns.

    ``dtypes`` are that in which shards are sent, and that of the unsharded tensors.

    **Collective:** all ranks of the mesh.
    """
    count = len(shards[layout.own])
    is_near = [each == layout.replicas[layout.own] for each in layout.replicas]
    sent = [part if near else [] for part, near in zip(shards, is_near, strict=True)]
    boxes = [box for box, near in zip(layout.boxes, is_near, strict=True) if near and box.numel]
    sizes = [
        count * box.numel if near else 0 for box, near in zip(layout.boxes, is_near, strict=True)
    ]

    def unpack(received: torch.Tensor) -> list[torch.Tensor]:
        # Each in memory of its own: the bits of products may depend on how operands are aligned.
        whole = [
            torch.empty(layout.shape, dtype=dtypes[1], device=layout.device) for _ in range(count)
        ]
        if count and boxes:
            parts = received.split([count * box.numel for box in boxes])
            pairs = list(zip(parts, boxes, strict=True))
            foreach_copy_(
                [each[box.slices] for box in boxes for each in whole],
                [shard for part, box in pairs for shard in part.view(count, *box.sizes)],
            )
        return whole

    numel = sum(map(len, shards)) * layout.shape.numel()
    return InFlight(_start(layout, sent, sizes, numel, dtypes[0], comm, label), unpack)


def start_from_owners(
    layout: Layout,
    unsharded: Sequence[torch.Tensor],
    counts: Sequence[int],
    dtype: torch.dtype,
    comm: Communicator,
    label: str,
) -> InFlight:
    """Send every rank its shards of ``unsharded``, which this rank owns.

    ``counts`` says how many tensors each rank owns. ``finish`` returns this rank's shards of all of
    them, owner by owner.

    **Collective:** all ranks of the mesh.
    """
    box = layout.boxes[layout.own]
    sent = [[each[other.slices] for each in unsharded] for other in layout.boxes]
    sizes = [count * box.numel for count in counts]

    def unpack(received: torch.Tensor) -> list[torch.Tensor]:
        return list(received.view(sum(counts), *box.sizes))

    numel = sum(counts) * layout.shape.numel() * layout.num_replicas
    return InFlight(_start(layout, sent, sizes, numel, dtype, comm, label), unpack)


def _start(
    layout: Layout,
    sent: Sequence[Sequence[torch.Tensor]],  # to each rank
    received: list[int],  # numbers of elements from each rank
    numel: int,  # of what all ranks send together, to themselves too
    dtype: torch.dtype,
    comm: Communicator,
    label: str,
) -> Handle:
    sizes = [sum(each.numel() for each in part) for part in sent]
    flat = torch.empty(sum(sizes), dtype=dtype, device=layout.device)
    tensors = [each for part in sent for each in part if each.numel()]
    if tensors:
        parts = flat.split([each.numel() for each in tensors])
        views = [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
        foreach_copy_(views, tensors)
    with comm.on_stream(CommStream.OPTIMIZER):
        return comm.all_to_all(flat, sizes, received, numel=numel, group=layout.group, label=label)
