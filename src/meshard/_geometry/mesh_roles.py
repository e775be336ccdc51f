"""Which mesh axis shards, which replicates?"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard


@dataclass(frozen=True, slots=True, eq=False)
class MeshRoles:
    """The two roles of a data-parallel mesh, with the groups that play them on this rank.

    A 1D mesh only shards. A 2D mesh is ``(replicate, shard)``: its last axis shards.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_count: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None  # None on a 1D mesh
    replicate_count: int  # 1 on a 1D mesh

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshRoles:
        """Read the roles off ``mesh``.

        Raises:
            ValueError: The mesh is neither 1D nor 2D.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard needs a 1D mesh (shard) or a 2D mesh (replicate, shard), got {mesh}; "
                "pass the data-parallel part of a larger mesh, as in mesh['replicate', 'shard']."
            )
        shard_axis = mesh.ndim - 1
        return cls(
            mesh=mesh,
            shard_group=mesh.get_group(shard_axis),
            shard_count=mesh.size(shard_axis),
            shard_rank=mesh.get_local_rank(shard_axis),
            replicate_group=mesh.get_group(0) if mesh.ndim == 2 else None,
            replicate_count=mesh.size(0) if mesh.ndim == 2 else 1,
        )

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The shard group, and the replica group if there is one."""
        replicas = [] if self.replicate_group is None else [self.replicate_group]
        return [self.shard_group, *replicas]

    def placements(self, shard_dim: int) -> tuple[Placement, ...]:
        """Return the DTensor placements of a parameter sharded on tensor dim ``shard_dim``."""
        if self.mesh.ndim == 1:
            return (Shard(shard_dim),)
        return (Replicate(), Shard(shard_dim))


def group_of_neighbours(roles: MeshRoles, group_size: int) -> dist.ProcessGroup:
    """Return the group of ``group_size`` consecutive shard ranks that this rank belongs to.

    **Collective:** every rank of the default group, in the same order, the first time that a
    mesh is seen with this size; later calls answer from a cache.

    Args:
        roles: The mesh to split along its shard axis.
        group_size: Ranks in each part; divides ``roles.shard_count``.
    """
    # On the mesh itself, so that groups die with it: a process group that is alive when the
    # interpreter ends aborts the process, and an equal mesh may belong to another world.
    cache: dict[int, DeviceMesh] = vars(roles.mesh).setdefault("_meshard_neighbours", {})
    if group_size not in cache:
        rows = roles.mesh.mesh.reshape(-1, group_size)
        cache[group_size] = DeviceMesh(roles.mesh.device_type, rows.clone())
    return cache[group_size].get_group(1)


def group_for_scatter(roles: MeshRoles) -> dist.ProcessGroup:
    """Return a second group of the ranks of the shard group; always the same one for a mesh.

    **Collective:** the shard group, the first time.
    """
    if "_meshard_scatter_group" not in vars(roles.mesh):  # dies with the mesh, as above
        ranks = dist.get_process_group_ranks(roles.shard_group)
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc="meshard_scatter")
        vars(roles.mesh)["_meshard_scatter_group"] = group
    group = vars(roles.mesh)["_meshard_scatter_group"]
    assert isinstance(group, dist.ProcessGroup)
    return group
