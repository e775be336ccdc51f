"""Over which mesh, and along which dim, is each parameter of a unit sharded?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshard._geometry.layout import ParamLayout
from meshard._geometry.mesh_roles import MeshRoles
from meshard._geometry.named_axes import roles_of_named
from meshard._geometry.placed import Placed, Spread, check_places, place_again
from meshard._params.dtensors import local_of
from meshard._params.extension import check_extension
from meshard.policies import DataParallelMeshDims, ShardPlacementResult

PlacementFn = Callable[[nn.Parameter], Any]


class Placing(NamedTuple):
    """Where a parameter goes."""

    roles: MeshRoles
    layout: ParamLayout  # of what this rank holds of it
    placed: Placed | None  # None: an ordinary tensor
    is_extended: bool = False  # it says itself what is gathered of it: see extension

    def own_part(self, param: nn.Parameter) -> torch.Tensor:
        """Return what this rank will own of ``param``: a view, of an extended one a copy."""
        whole = param.detach() if self.placed is None else local_of(param.detach())
        if self.is_extended:
            return _own_copy(whole, self.roles)
        rows = self.layout.owned_rows(self.roles.shard_rank)
        return whole.narrow(self.layout.shard_dim, rows.start, len(rows))


def _own_copy(whole: torch.Tensor, roles: MeshRoles) -> torch.Tensor:
    """Return this rank's rows by the operations that torch's fully_shard asks of subclasses."""
    chunks = whole.chunk(roles.shard_count)
    has_any = roles.shard_rank < len(chunks)
    own = chunks[roles.shard_rank] if has_any else chunks[0].narrow(0, 0, 0)
    copied = own.new_zeros(own.shape)
    copied.copy_(own)
    return copied


def roles_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> MeshRoles:
    """Return the roles of the mesh that was passed to ``fully_shard``.

    Raises:
        ValueError: The mesh has no such axes, or not one or two where none are named.
    """
    if dims is None:
        return MeshRoles.of(mesh)
    return roles_of_named(mesh, _as_tuple(dims.shard), _as_tuple(dims.replicate))


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else names


class Placer:
    """Places the parameters of one call of ``fully_shard``.

    Args:
        roles: Of the mesh that was passed.
        placement_fn: What the user chose per parameter, or None.
    """

    def __init__(self, roles: MeshRoles, placement_fn: PlacementFn | None) -> None:
        self._roles = {roles.mesh: roles}
        self._whole: dict[int, MeshRoles] = {}
        self._default = roles
        self._placement_fn = placement_fn

    def place(self, fqn: str, param: nn.Parameter) -> Placing:
        """Return where a parameter goes.

        Raises:
            ValueError: ``placement_fn`` returned something else than None, a valid ``Shard``,
                ``Replicate`` or ``ShardPlacementResult``, or the parameter is a DTensor that does
                not fit.
        """
        chosen = self._placement_fn(param) if self._placement_fn is not None else None
        roles, chosen = self._roles_for(fqn, chosen)
        if type(chosen) is Replicate:
            if id(roles) not in self._whole:
                self._whole[id(roles)] = roles.keeping_whole()
            roles, chosen = self._whole[id(roles)], None
        shard_dim = _shard_dim(fqn, param, chosen)
        is_extended = _check_extended(fqn, param, shard_dim, roles)
        if not isinstance(param, DTensor):
            layout = ParamLayout(param.shape, shard_dim, roles.shard_count)
            return Placing(roles, layout, None, is_extended)
        spread = Spread(param.device_mesh, param.placements, param.shape)
        try:
            check_places(spread, roles)
            placed = place_again(spread, roles)
        except ValueError as error:
            raise ValueError(f"parameter {fqn!r} is a DTensor already: {error}") from error
        layout = ParamLayout(local_of(param).shape, shard_dim, roles.shard_count)
        return Placing(roles, layout, placed, is_extended)

    def _roles_for(self, fqn: str, chosen: Any) -> tuple[MeshRoles, Any]:
        """Return the mesh that ``placement_fn`` chose, and the placement on it."""
        if chosen is None or isinstance(chosen, (Shard, Replicate)):
            return self._default, chosen
        # FSDP2's own class for this, in a private place, has a mesh_info.
        is_ours = isinstance(chosen, ShardPlacementResult)
        mesh = getattr(chosen if is_ours else getattr(chosen, "mesh_info", None), "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            return self._default, chosen  # whatever it is, it is no valid placement
        if mesh.device_type != self._default.mesh.device_type:
            raise ValueError(
                f"shard_placement_fn returned {mesh} for parameter {fqn!r}, but the mesh of the "
                f"unit is on {self._default.mesh.device_type!r}; use meshes of one device type."
            )
        if mesh not in self._roles:
            try:
                self._roles[mesh] = MeshRoles.of(mesh)
            except ValueError as error:
                raise ValueError(f"shard_placement_fn for parameter {fqn!r}: {error}") from error
        return self._roles[mesh], chosen.placement


def _check_extended(fqn: str, param: nn.Parameter, shard_dim: int, roles: MeshRoles) -> bool:
    """Return whether a parameter says itself what is gathered of it."""
    local = local_of(param) if isinstance(param, DTensor) else param
    is_extended = check_extension(fqn, local)
    if is_extended and roles.shard_axis is None:
        raise NotImplementedError(
            f"parameter {fqn!r} is a {type(local).__name__} with fsdp_pre_all_gather, and there is "
            "no axis to shard it over; leave it out (ignored_params), or name a shard axis."
        )
    if is_extended and shard_dim:
        raise NotImplementedError(
            f"parameter {fqn!r} is a {type(local).__name__} with fsdp_pre_all_gather, which can be "
            f"sharded on dim 0 only; shard_placement_fn chose dim {shard_dim}."
        )
    return is_extended


def _shard_dim(fqn: str, param: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    # Not isinstance: _StridedShard and other special shards do not mean what Shard means.
    if type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {fqn!r}; return "
            "torch.distributed.tensor.Shard(dim), Replicate() to keep it whole, "
            "meshard.ShardPlacementResult of one of these and a mesh, or None for Shard(0)."
        )
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {fqn!r}, "
            f"which has only {param.dim()} dims."
        )
    return placement.dim % param.dim()


class OnMesh(NamedTuple):
    """The parameters of one call that are gathered by one collective."""

    roles: MeshRoles
    places: list[int]  # among all that were placed
    is_extended: bool  # all, or none


def by_mesh(placings: list[Placing], first: MeshRoles) -> list[OnMesh]:
    """Return what goes onto each mesh, ``first`` first; nothing onto that, if there is nothing.

    Extended parameters are apart from the others, with a gather of their own.
    """
    plain = OnMesh(first, [], False)
    groups = {(id(first), False): plain}
    for place, (roles, _, _, is_extended) in enumerate(placings):
        new = OnMesh(roles, [], is_extended)
        groups.setdefault((id(roles), is_extended), new).places.append(place)
    return [group for group in groups.values() if group.places] or [plain]
