"""This rank's part of each shard of a unit, if gradients are reduce-scattered over the replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from meshard._mesh.layout import ParamLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.sharded_param import ShardedParam
from meshard._torch.dtensor import local_of, make_dtensor


class ReplicaParts:
    """How ``R`` replicas cut each shard once more: along the same dim, into ``R`` chunks of rows.

    A part is a DTensor over the rows of the shard that this rank owns. It has the shape of the
    parameter, and is sharded on both axes of the mesh.
    """

    def __init__(self, params: Sequence[ShardedParam], mesh_info: MeshInfo) -> None:
        assert mesh_info.replicate_group is not None
        self.group = mesh_info.replicate_group
        self.rank = self.group.rank()
        self.layouts = [  # of this rank's shards
            ParamLayout(
                param.layout.local_shape(mesh_info.shard_rank),
                param.layout.shard_dim,
                self.group.size(),
            )
            for param in params
        ]
        self._params, self._mesh_info = params, mesh_info
        self._parts: list[tuple[torch.Tensor | None, DTensor | None]] = [(None, None)] * len(params)

    def part(self, index: int) -> DTensor:
        """Return this rank's part of a sharded parameter: a view of its present shard."""
        shard = local_of(self._params[index].sharded)
        known, part = self._parts[index]
        if part is None or known is not shard:
            part = self.cut(index, shard)
            self._parts[index] = shard, part
        return part

    def cut(self, index: int, local: torch.Tensor) -> DTensor:
        """Return this rank's part of ``local``, which has the shape of the shard."""
        param, own = self._params[index].layout, self.layouts[index].own_part(local, self.rank)
        placements = self._mesh_info.owned_placements(param.shard_dim)
        return make_dtensor(own.detach(), self._mesh_info.mesh, placements, param.shape)
