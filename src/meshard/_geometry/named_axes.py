"""Which axes of a larger mesh are data-parallel, by their names?"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.device_mesh import DeviceMesh

from meshard._geometry.mesh_roles import FullMesh, MeshRoles, group_of_one, joined_mesh


def roles_of_named(
    mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]
) -> MeshRoles:
    """Return the roles on ``mesh`` of the axes ``shard`` and ``replicate``, several as one.

    **Collective:** all ranks of the default group, the first time that several axes are flattened
    into one.

    Args:
        mesh: All axes, with names.
        shard: Axes over which parameters are sharded; none: they are only replicated.
        replicate: Axes over which they are replicated.

    Raises:
        ValueError: An axis does not exist, or the names are not in the order of the mesh.
    """
    _check_names(mesh, shard, replicate)
    assert mesh.mesh_dim_names is not None
    parts: list[DeviceMesh] = []  # with the shard axes as one
    origins: list[int | None] = []
    for axis, name in enumerate(mesh.mesh_dim_names):
        if name not in shard:
            parts.append(mesh[name])
            origins.append(axis)
        elif name == shard[0]:
            parts.append(_flat(mesh, shard))
            origins.append(None)
    names = {*shard, *replicate}
    data_axes = frozenset(mesh.mesh_dim_names.index(name) for name in names)
    data_parts = [
        (part, origin)
        for part, origin in zip(parts, origins, strict=True)
        if origin is None or origin in data_axes
    ]
    shard_axes = [place for place, (_, origin) in enumerate(data_parts) if origin is None]
    shard_mesh = _flat(mesh, shard) if shard else None
    replicas = _flat(mesh, replicate) if replicate else None
    return MeshRoles(
        mesh=_join(part for part, _ in data_parts),
        shard_axis=shard_axes[0] if shard_axes else None,
        # Without shard axes every rank is a shard group of its own, which never communicates.
        shard_group=shard_mesh.get_group() if shard_mesh else group_of_one(),
        shard_count=shard_mesh.size() if shard_mesh else 1,
        shard_rank=shard_mesh.get_local_rank() if shard_mesh else 0,
        replicate_group=replicas.get_group() if replicas else None,
        replicate_count=replicas.size() if replicas else 1,
        full=FullMesh(
            mesh=mesh,
            at_rest=mesh if len(shard) < 2 else _join(parts),
            origins=tuple(origins),
            data_axes=data_axes,
        ),
    )


def _check_names(mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]) -> None:
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
                f"dp_mesh_dims names {names}, but in {mesh} they come in another order; name them "
                "in the order of the mesh, in which they are flattened."
            )


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    # Private, and the only way to a process group over several axes that the mesh remembers.
    return DeviceMesh._flatten(mesh[names])


def _join(parts: Iterable[DeviceMesh]) -> DeviceMesh:
    listed = list(parts)
    return listed[0] if len(listed) == 1 else joined_mesh(listed)
