"""Construction of units.

``collect`` and the checks look and do not touch; ``make_unit`` allocates; only ``commit`` changes
the module, with steps that do not fail.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshard._comm.divergence import number_root
from meshard._engine.hooks import (
    gradient_hook_maker,
    register_hooks,
    register_load_hooks,
)
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.on_access import gather_on_access
from meshard._engine.param_group import ParamGroup
from meshard._engine.unit import Casts, Unit, UnitSettings, unit_of, units_of, with_siblings
from meshard._gradients.accumulator import GradientAccumulator
from meshard._mesh.layout import ParamLayout
from meshard._mesh.mesh_info import MeshInfo, mesh_info_of_named_axes
from meshard._mesh.placement import (
    DTensorPlacement,
    PlacedTensor,
    check_composable,
    compose_placement,
)
from meshard._params.flat_params import FlatParams, GroupSpec, UnitParams
from meshard._params.sharded_param import ShardedParam, TensorTag, tag_of, tag_tensor
from meshard._params.storage import MemoryLocation
from meshard._params.subclass_params import SubclassParams, check_gather_methods
from meshard._shared_memory.factory import make_communicator
from meshard._torch.dtensor import local_of
from meshard._torch.private import queue_backward_callback
from meshard.fsdp_module import FSDPModule
from meshard.policies import DataParallelMeshDims, MixedPrecisionPolicy, ShardPlacementResult

PlacementFn = Callable[[nn.Parameter], Any]


class ShardSpec(NamedTuple):
    """Where a parameter goes."""

    mesh_info: MeshInfo
    layout: ParamLayout  # of what this rank holds of it
    dtensor_placement: DTensorPlacement | None  # None: an ordinary tensor
    is_subclass: bool = False  # it says itself what is gathered of it: see extension

    def own_part(self, param: nn.Parameter) -> torch.Tensor:
        """Return what this rank will own of ``param``: a view, of an extended one a copy."""
        unsharded = param.detach() if self.dtensor_placement is None else local_of(param.detach())
        if self.is_subclass:
            return _own_copy(unsharded, self.mesh_info)
        rows = self.layout.owned_rows(self.mesh_info.shard_rank)
        return unsharded.narrow(self.layout.shard_dim, rows.start, len(rows))


def _own_copy(unsharded: torch.Tensor, mesh_info: MeshInfo) -> torch.Tensor:
    """Return this rank's rows by the operations that torch's fully_shard asks of subclasses."""
    chunks = unsharded.chunk(mesh_info.shard_count)
    has_any = mesh_info.shard_rank < len(chunks)
    own = chunks[mesh_info.shard_rank] if has_any else chunks[0].narrow(0, 0, 0)
    copied = own.new_zeros(own.shape)
    copied.copy_(own)
    return copied


def resolve_mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> MeshInfo:
    """Return the roles of the mesh that was passed to ``fully_shard``.

    Raises:
        ValueError: The mesh has no such axes, or not one or two where none are named.
    """
    if dims is None:
        return MeshInfo.of(mesh)
    return mesh_info_of_named_axes(mesh, _as_tuple(dims.shard), _as_tuple(dims.replicate))


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else names


class ShardSpecResolver:
    """Places the parameters of one call of ``fully_shard``.

    Args:
        roles: Of the mesh that was passed.
        placement_fn: What the user chose per parameter, or None.
    """

    def __init__(self, mesh_info: MeshInfo, placement_fn: PlacementFn | None) -> None:
        self._mesh_info = {mesh_info.mesh: mesh_info}
        self._unsharded: dict[int, MeshInfo] = {}
        self._default = mesh_info
        self._placement_fn = placement_fn

    def resolve(self, fqn: str, param: nn.Parameter) -> ShardSpec:
        """Return where a parameter goes.

        Raises:
            ValueError: ``placement_fn`` returned something else than None, a valid ``Shard``,
                ``Replicate`` or ``ShardPlacementResult``, or the parameter is a DTensor that does
                not fit.
        """
        chosen = self._placement_fn(param) if self._placement_fn is not None else None
        mesh_info, chosen = self._mesh_info_for(fqn, chosen)
        if type(chosen) is Replicate:
            if id(mesh_info) not in self._unsharded:
                self._unsharded[id(mesh_info)] = mesh_info.replicating_all()
            mesh_info, chosen = self._unsharded[id(mesh_info)], None
        shard_dim = _shard_dim(fqn, param, chosen)
        is_subclass = _check_subclass(fqn, param, shard_dim, mesh_info)
        if not isinstance(param, DTensor):
            layout = ParamLayout(param.shape, shard_dim, mesh_info.shard_count)
            return ShardSpec(mesh_info, layout, None, is_subclass)
        placed_tensor = PlacedTensor(param.device_mesh, param.placements, param.shape)
        try:
            check_composable(placed_tensor, mesh_info)
            dtensor_placement = compose_placement(placed_tensor, mesh_info)
        except ValueError as error:
            raise ValueError(f"parameter {fqn!r} is a DTensor already: {error}") from error
        layout = ParamLayout(local_of(param).shape, shard_dim, mesh_info.shard_count)
        return ShardSpec(mesh_info, layout, dtensor_placement, is_subclass)

    def _mesh_info_for(self, fqn: str, chosen: Any) -> tuple[MeshInfo, Any]:
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
        if mesh not in self._mesh_info:
            try:
                self._mesh_info[mesh] = MeshInfo.of(mesh)
            except ValueError as error:
                raise ValueError(f"shard_placement_fn for parameter {fqn!r}: {error}") from error
        return self._mesh_info[mesh], chosen.placement


def _check_subclass(fqn: str, param: nn.Parameter, shard_dim: int, mesh_info: MeshInfo) -> bool:
    """Return whether a parameter says itself what is gathered of it."""
    local = local_of(param) if isinstance(param, DTensor) else param
    is_subclass = check_gather_methods(fqn, local)
    if is_subclass and mesh_info.shard_axis is None:
        raise NotImplementedError(
            f"parameter {fqn!r} is a {type(local).__name__} with fsdp_pre_all_gather, and there is "
            "no axis to shard it over; leave it out (ignored_params), or name a shard axis."
        )
    if is_subclass and shard_dim:
        raise NotImplementedError(
            f"parameter {fqn!r} is a {type(local).__name__} with fsdp_pre_all_gather, which can be "
            f"sharded on dim 0 only; shard_placement_fn chose dim {shard_dim}."
        )
    return is_subclass


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


class ParamsOnMesh(NamedTuple):
    """The parameters of one call that are gathered by one collective."""

    mesh_info: MeshInfo
    positions: list[int]  # among all that were placed
    is_subclass: bool  # all, or none


def by_mesh(shard_specs: list[ShardSpec], first: MeshInfo) -> list[ParamsOnMesh]:
    """Return what goes onto each mesh, ``first`` first; nothing onto that, if there is nothing.

    Extended parameters are apart from the others, with a gather of their own.
    """
    plain = ParamsOnMesh(first, [], False)
    groups = {(id(first), False): plain}
    for position, (mesh_info, _, _, is_subclass) in enumerate(shard_specs):
        new = ParamsOnMesh(mesh_info, [], is_subclass)
        groups.setdefault((id(mesh_info), is_subclass), new).positions.append(position)
    return [group for group in groups.values() if group.positions] or [plain]


class Collected(NamedTuple):
    """A parameter that a unit will manage."""

    fqn: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]


def named_modules_outside_units(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over ``root`` and its submodules, without those that are units or inside one."""
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        prefix, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield prefix, module
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in module._modules.items()
            if child is not None and unit_of(child) is None
        ]
        stack.extend(reversed(children))


def collect(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[Collected]:
    """List the parameters of ``modules`` that are in no unit yet, tied ones once.

    Raises:
        ValueError: A parameter is managed by a unit around or beside ``modules``.
    """
    found: dict[nn.Parameter, Collected] = {}
    for position, root in enumerate(modules):
        for prefix, module in named_modules_outside_units(root):
            for name, param in module._parameters.items():
                if param is None or param in ignored or not _may_take(modules, param):
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                if len(modules) > 1:
                    fqn = f"{position}.{fqn}"
                if param in found:
                    found[param].owners.append((module, name))
                else:
                    found[param] = Collected(fqn, param, [(module, name)])
                    _check_free(fqn, param)
    _collect_hoisted(modules, found)
    return list(found.values())


@contextlib.contextmanager
def hoisting(hoisted: dict[nn.Parameter, nn.Module]) -> Iterator[None]:
    """Reserve each tied parameter for the unit of ``hoisted[param]``."""
    for param, location in hoisted.items():
        param._meshard_hoisted_to = weakref.ref(location)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param in hoisted:
            del param._meshard_hoisted_to  # type: ignore[attr-defined]


def _hoisted_to(param: nn.Parameter) -> nn.Module | None:
    ref = getattr(param, "_meshard_hoisted_to", None)
    return None if ref is None else ref()


def _may_take(modules: list[nn.Module], param: nn.Parameter) -> bool:
    location = _hoisted_to(param)
    return location is None or location in modules


def _collect_hoisted(modules: list[nn.Module], found: dict[nn.Parameter, Collected]) -> None:
    """Add the uses inside inner units of parameters that ``modules`` are the home of."""
    for root in modules:
        for prefix, module in root.named_modules():
            for name, param in module._parameters.items():
                if param is None or _hoisted_to(param) is not root:
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                owners = found.setdefault(param, Collected(fqn, param, [])).owners
                if (module, name) not in owners:
                    owners.append((module, name))


def _check_free(fqn: str, param: nn.Parameter) -> None:
    kind, marked = tag_of(param)
    if kind is TensorTag.ORIGINAL:
        raise ValueError(
            f"parameter {fqn!r} is tied to {marked!r}, which an inner fully_shard has "
            "already sharded, so the tie would be cut silently; shard both in one call "
            "(apply fully_shard to their common parent only, or pass both modules as a list)."
        )
    if kind is TensorTag.SHARD:
        raise ValueError(
            f"parameter {fqn!r} already belongs to a unit (as {marked!r}): that of a module "
            "around this one, or of another module that shares it. Call fully_shard on children "
            "before their parents; what is shared goes to the unit around all of its uses, as "
            "fully_shard_units does it."
        )


def check_parameters(found: Iterable[Collected], device: torch.device) -> None:
    """Check what can be sharded onto ``device``.

    Raises:
        ValueError: A parameter is on a third device, is a scalar, or is complex.
    """
    for fqn, param, _ in found:
        movable = param.device.type in ("cpu", "meta")
        if not movable and param.device != device:
            raise ValueError(
                f"parameter {fqn!r} is on {param.device}, but the mesh is on {device}; "
                "move the module there (or to the CPU) before fully_shard."
            )
        if param.dim() == 0:
            raise ValueError(
                f"parameter {fqn!r} is a scalar and cannot be sharded; give it shape (1,), "
                "or pass it in ignored_params."
            )
        if param.is_complex():
            raise ValueError(
                f"parameter {fqn!r} is {param.dtype}; complex parameters are not supported, "
                "hold torch.view_as_real of it as the parameter."
            )


def make_unit(
    modules: list[nn.Module],
    found: list[Collected],
    *,
    shard_specs: list[ShardSpec],
    policy: MixedPrecisionPolicy,
    settings: UnitSettings,
    device: torch.device,
    host: MemoryLocation | None = None,
) -> Unit:
    """Return a unit for ``modules`` that nothing refers to yet.

    All parameters go onto the same mesh, and are extended, or none is.
    """
    casts = Casts(
        inputs=policy.param_dtype if policy.cast_forward_inputs else None,
        outputs=policy.output_dtype,
    )
    unit = Unit(modules, casts, settings)
    if not found:
        return unit
    spec = GroupSpec(shard_specs[0].mesh_info, device, host)
    storage = _make_unsharded_params(unit, found, shard_specs, spec, policy)
    gradients = GradientAccumulator(
        storage,
        reduce_dtype=policy.reduce_dtype,
        accumulate_dtype=policy.accumulate_dtype,
    )
    unit.group = ParamGroup(storage, gradients)
    return unit


def _make_unsharded_params(
    unit: Unit,
    found: list[Collected],
    shard_specs: list[ShardSpec],
    spec: GroupSpec,
    policy: MixedPrecisionPolicy,
) -> UnitParams:
    params, shards = [], []
    for (fqn, param, owners), shard_spec in zip(found, shard_specs, strict=True):
        params.append(ShardedParam(fqn, owners, shard_spec.layout, shard_spec.dtensor_placement))
        shards.append(shard_spec.own_part(param))
    flags = [entry.param.requires_grad for entry in found]
    gradient_hook = gradient_hook_maker(unit)
    if shard_specs[0].is_subclass:
        return SubclassParams(
            params, shards, flags, spec=spec, mp_policy=policy, gradient_hook=gradient_hook
        )
    return FlatParams(
        params,
        shards,
        flags,
        spec=spec,
        param_dtype=policy.param_dtype,
        gradient_hook=gradient_hook,
    )


def commit(
    unit: Unit, modules: list[nn.Module], found: list[Collected], device: torch.device
) -> None:
    """Make ``modules`` the modules of ``unit``, and ``unit`` the parent of the units inside.

    Args:
        unit: With its companions.
        modules: Of the unit.
        found: The parameters of the unit, then those of its companions.
        device: Of the mesh.
    """
    chain = with_siblings(unit)
    all_sharded = [param for each in chain if each.group is not None for param in each.group.params]
    for sharded, (fqn, param, _) in zip(all_sharded, found, strict=True):
        # Whoever still holds the original holds a tie that the unit does not know of.
        tag_tensor(param, TensorTag.ORIGINAL, fqn)
        sharded.install(sharded.sharded)
    for module in modules:
        FSDPModule.adopt(module, unit)
    for each in reversed(chain):  # so that the outermost is entered first, and left last
        register_hooks(each)
        register_load_hooks(each)
    if unit.settings.unshard_on_access:
        gather_on_access(unit)
    adopt_inner_units(unit, modules, device)


def adopt_inner_units(unit: Unit, modules: list[nn.Module], device: torch.device) -> None:
    """Name the units inside after their place, and give all of them one lifecycle."""
    units = with_siblings(unit)
    innermost = units[-1]
    for position, root in enumerate(modules):
        for fqn, module in root.named_modules():
            for inner in units_of(module):
                if inner in units:
                    continue
                units.append(inner)
                inner.fqn = f"{position}.{fqn}" if len(modules) > 1 else fqn
                inner.step.reset()  # it may have run by itself
                if inner.parent is None:
                    inner.parent = weakref.ref(innermost)
                    innermost.children.append(weakref.ref(inner))
    comm = make_communicator(device)
    mesh_infos = [each.group.spec.mesh_info for each in units if each.group is not None]
    number_root(comm, [group for mesh_info in mesh_infos for group in mesh_info.groups])
    Lifecycle(queue_backward_callback, comm).set_units(units)
