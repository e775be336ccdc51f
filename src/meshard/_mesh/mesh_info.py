"""Shard and replicate axes of a device mesh, with their process groups."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshard._torch.private import concatenate_meshes, flatten_mesh, strided_shard, timeout_of


@dataclass(frozen=True, slots=True, eq=False)
class FullMesh:
    """A mesh of which only some axes are data-parallel."""

    mesh: DeviceMesh  # all axes; the mesh over which users have placed parameters
    flattened: DeviceMesh  # the same mesh with its shard axes flattened into one
    # For each axis of ``flattened``, which axis of ``mesh`` it is; None if it is data-parallel.
    origins: tuple[int | None, ...]
    data_axes: frozenset[int]  # the data-parallel axes of ``mesh``


# The axes of meshes along which ranks have been found to ascend: to read the ranks of a mesh takes
# longer than all else that sharding a small unit needs of it.
_ascending_axes: weakref.WeakKeyDictionary[DeviceMesh, list[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class MeshInfo:
    """The shard and replicate axes of a data-parallel mesh, with this rank's process groups.

    ``of`` takes the axis of a 1D mesh as the shard axis, and the axes of a 2D mesh as
    ``(replicate, shard)``. ``mesh_info_of_named_axes`` chooses axes by name.
    """

    mesh: DeviceMesh  # has the data-parallel axes only
    shard_axis: int | None  # an axis of ``mesh``; all other axes replicate
    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None  # None if no axis replicates
    full: FullMesh | None = None  # the mesh from which the axes were chosen by name, if they were

    def __post_init__(self) -> None:
        # A process group numbers its ranks in ascending order, a DTensor by their place in the
        # mesh. Both must give a rank the same shard.
        axis, ascending = self.shard_axis, _ascending_axes.setdefault(self.mesh, [])
        if axis is None or axis in ascending:
            return
        if bool((self.mesh.mesh.diff(dim=axis) < 0).any()):
            raise ValueError(
                f"the ranks of mesh {self.mesh.mesh.tolist()} do not ascend along shard axis "
                f"{axis}; make the mesh with ascending ranks, as init_device_mesh does."
            )
        ascending.append(axis)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshInfo:
        """Return the axes of a 1D or 2D mesh. Raises a ValueError for others."""
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard needs a 1D mesh (shard) or a 2D mesh (replicate, shard), got {mesh}; "
                "pass the data-parallel part of a larger mesh, as in mesh['replicate', 'shard'], "
                "or name its axes with dp_mesh_dims."
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}; a "
                "module is sharded on the ranks of its mesh only."
            )
        shard_axis = mesh.ndim - 1
        replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        return cls(mesh, shard_axis, mesh.get_group(shard_axis), replicas)

    def replicating_all(self) -> MeshInfo:
        """Return the same mesh with all axes replicating and none sharding.

        **Collective:** the ranks of the mesh, at the first call for a mesh with several axes.
        """
        group = self.replicate_group
        if group is None:
            group = self.shard_group
        elif self.shard_axis is not None:
            group = whole_mesh_pg(self.mesh)
        return MeshInfo(self.mesh, None, pg_of_one(), group, self.full)

    @property
    def shard_count(self) -> int:
        return self.shard_group.size()

    @property
    def shard_rank(self) -> int:
        return self.shard_group.rank()

    @property
    def replicate_count(self) -> int:
        """The number of replicas; 1 if no axis replicates."""
        return 1 if self.replicate_group is None else self.replicate_group.size()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        replicas = [] if self.replicate_group is None else [self.replicate_group]
        return [self.shard_group, *replicas]

    @property
    def is_in_first_replica(self) -> bool:
        return self.replicate_group is None or self.replicate_group.rank() == 0

    @property
    def is_first_rank(self) -> bool:
        return self.shard_rank == 0 and self.is_in_first_replica

    def placements(self, shard_dim: int) -> tuple[Placement, ...]:
        """Return the DTensor placements of a parameter sharded on tensor dim ``shard_dim``."""
        axes = range(self.mesh.ndim)
        return tuple(Shard(shard_dim) if axis == self.shard_axis else Replicate() for axis in axes)

    def owned_placements(self, shard_dim: int) -> tuple[Placement, ...]:
        """Return the placements of a tensor whose shards are cut once more over the replicas."""
        again: Placement = Shard(shard_dim)
        if self.shard_count > 1 and self.shard_axis == self.mesh.ndim - 1:
            # torch lets the leftmost axis cut first, unless its placement is strided.
            again = strided_shard(shard_dim, split_factor=self.shard_count)
        axes = range(self.mesh.ndim)
        return tuple(Shard(shard_dim) if axis == self.shard_axis else again for axis in axes)

    def partial_placements(self, shard_dim: int) -> tuple[Placement, ...]:
        """Return the placements of a gradient that has not been reduced across the replicas."""
        placements = self.placements(shard_dim)
        return tuple(each if isinstance(each, Shard) else Partial("avg") for each in placements)


def shard_mesh_of(mesh_info: MeshInfo) -> DeviceMesh:
    """Return the 1D mesh of the ranks that hold the shards of one parameter."""
    if mesh_info.mesh.ndim == 1:
        return mesh_info.mesh
    names = mesh_info.mesh.mesh_dim_names
    if names is not None and mesh_info.shard_axis is not None:
        return mesh_info.mesh[names[mesh_info.shard_axis]]
    return DeviceMesh.from_group(mesh_info.shard_group, mesh_info.mesh.device_type)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of the tensors that this rank passes to collectives of ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def pg_of_one() -> dist.ProcessGroup:
    """Return a group of this rank alone. It needs no backend, and has none."""
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's stub lacks this signature


_GroupKey = tuple[str, tuple[int, ...]]  # a name and the ranks
# The groups that ``_extra_pg`` has made, by the group of a mesh for which they were made. They are
# not attributes of the mesh, because a mesh is pickled with its DTensors, and groups cannot be.
_extra_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_GroupKey, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def _extra_pg(
    mesh: DeviceMesh, like: dist.ProcessGroup, name: str, ranks: list[int]
) -> dist.ProcessGroup:
    """Return a group of ``ranks`` with the backend and the timeout of ``like``, one of ``mesh``.

    **Collective:** ``ranks``, in the first call. It makes the group, and later calls return the
    same one. The ranks must make their groups in the same order.
    """
    groups, key = _extra_groups.setdefault(like, {}), (name, tuple(ranks))
    if key not in groups:
        group = dist.new_group(
            ranks,
            timeout=timeout_of(like, device_of(mesh)),
            backend=dist.get_backend_config(like),
            use_local_synchronization=True,
            group_desc=name,
        )
        assert isinstance(group, dist.ProcessGroup)
        groups[key] = group
    return groups[key]


def post_forward_pg(mesh_info: MeshInfo, group_size: int) -> dist.ProcessGroup:
    """Return the group of ``group_size`` consecutive shard ranks that this rank belongs to.

    **Collective:** the ranks of that group, in the first call for a mesh and size; see
    ``_extra_pg``.
    """
    first = mesh_info.shard_rank // group_size * group_size
    own = dist.get_process_group_ranks(mesh_info.shard_group)[first : first + group_size]
    name = f"meshard_post_forward_{group_size}"
    return _extra_pg(mesh_info.mesh, mesh_info.shard_group, name, own)


def separate_reduce_scatter_pg(mesh_info: MeshInfo) -> dist.ProcessGroup:
    """Return a second process group over the ranks of the shard group, made once per mesh.

    **Collective:** the shard group, the first time.
    """
    ranks = dist.get_process_group_ranks(mesh_info.shard_group)
    return _extra_pg(mesh_info.mesh, mesh_info.shard_group, "meshard_scatter", ranks)


def whole_mesh_pg(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a group of all ranks of ``mesh``, made once per mesh.

    **Collective:** the ranks of the mesh, the first time, if it has several axes.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    last = mesh.get_group(mesh.ndim - 1)
    return _extra_pg(mesh, last, "meshard_all", ranks_of_whole_mesh(mesh))


def ranks_of_whole_mesh(mesh: DeviceMesh) -> list[int]:
    """Return the global ranks of a mesh in the order in which ``whole_mesh_pg`` has them."""
    if mesh.ndim == 1:
        return dist.get_process_group_ranks(mesh.get_group())
    ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
    return ranks


def joined_mesh(parts: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of all ``parts``, in this order, and their process groups."""
    if len(parts) == 1:
        return parts[0]
    try:
        joined = concatenate_meshes(parts)
    except (AssertionError, RuntimeError, TypeError):  # a TypeError if axes have no names
        joined = None
    # torch accepts parts of different meshes. If these number ranks differently, the result has
    # wrong ranks, which ``_holds`` finds.
    if joined is None or not _holds(joined, parts):
        raise ValueError(
            f"the meshes {parts} cannot be joined; make one mesh with named axes "
            "(init_device_mesh) and take all of them from it, as in mesh['dp'] and mesh['tp']."
        )
    return joined


def _holds(joined: DeviceMesh, parts: list[DeviceMesh]) -> bool:
    """Whether this rank's slice of ``joined`` along the axes of each part has the part's ranks."""
    coordinate = joined.get_coordinate()
    if coordinate is None:
        return False
    first = 0
    for part in parts:
        own = range(first, first + part.ndim)
        index = [slice(None) if axis in own else at for axis, at in enumerate(coordinate)]
        if not torch.equal(joined.mesh[tuple(index)], part.mesh):
            return False
        first += part.ndim
    return True


def mesh_info_of_named_axes(
    mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]
) -> MeshInfo:
    """Return ``mesh`` with the axes ``shard`` and ``replicate`` as its data-parallel ones.

    **Collective:** all ranks of the default group, the first time that several axes are flattened
    into one.
    """
    known = _check_names(mesh, shard, replicate)
    shard_mesh = _flat(mesh, shard) if shard else None
    replicate_mesh = _flat(mesh, replicate) if replicate else None
    parts: list[DeviceMesh] = []  # one for all shard axes together, and one for each other axis
    origins: list[int | None] = []
    for axis, name in enumerate(known):
        if shard_mesh is not None and name == shard[0]:
            parts.append(shard_mesh)
            origins.append(None)
        elif name not in shard:
            parts.append(mesh[name])
            origins.append(None if name in replicate else axis)
    data_parts = [part for part, origin in zip(parts, origins, strict=True) if origin is None]
    positions = (position for position, part in enumerate(data_parts) if part is shard_mesh)
    shard_axis = next(positions, None)
    return MeshInfo(
        mesh=joined_mesh(data_parts),
        shard_axis=shard_axis,
        # Without shard axes every rank is a shard group of its own.
        shard_group=pg_of_one() if shard_mesh is None else shard_mesh.get_group(),
        replicate_group=None if replicate_mesh is None else replicate_mesh.get_group(),
        full=FullMesh(
            mesh=mesh,
            flattened=mesh if len(shard) < 2 else joined_mesh(parts),
            origins=tuple(origins),
            data_axes=frozenset(known.index(name) for name in {*shard, *replicate}),
        ),
    )


def _check_names(
    mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of all axes. Raises if chosen names are unknown or in another order."""
    known = mesh.mesh_dim_names
    if known is None:
        raise ValueError(
            f"dp_mesh_dims names axes, but {mesh} has no names; pass mesh_dim_names to "
            "init_device_mesh."
        )
    for names in (shard, replicate):
        for name in names:
            if name not in known:
                raise ValueError(f"dp_mesh_dims names the axis {name!r}, but {mesh} has {known}.")
        if list(names) != [name for name in known if name in names]:
            raise ValueError(
                f"dp_mesh_dims names {names}, but {mesh} has them in another order; name them in "
                "the order of the mesh, in which they are flattened."
            )
    return known


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names])
