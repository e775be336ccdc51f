"""Construction of units, in four steps.

``collect`` lists parameters, ``plan`` assigns them to units, ``allocate`` makes the units with
their shards, and ``commit`` changes the modules. All checks come before ``commit``. Until then the
user's modules stay as they are, except that their buffers are moved to the device.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshard._comm.divergence import RootNames
from meshard._engine.hooks import (
    gradient_hook_maker,
    register_forward_hooks,
    register_hooks,
    register_load_hooks,
)
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.param_group import Lease, owner_of
from meshard._engine.unit import (
    Root,
    Unit,
    UnitSettings,
    UnitStep,
    joined,
    nest,
    outside_units,
    own_class,
    units_of,
    with_siblings,
)
from meshard._mesh.layout import ParamLayout
from meshard._mesh.mesh_info import MeshInfo, device_of, mesh_info_of_named_axes
from meshard._mesh.placement import compose_placement
from meshard._params.custom_gather import (
    check_placement,
    has_class_methods,
    has_gather_methods,
    has_own_methods,
)
from meshard._params.flat_params import FlatParams
from meshard._params.unit_params import (
    Extent,
    GroupSpec,
    MemoryLocation,
    ShardedParam,
    TensorTag,
    extent_of,
    tag_of,
    tag_tensor,
)
from meshard._torch.dtensor import is_plain, keep_gradient_dtype, plain_of
from meshard.policies import DataParallelMeshDims, MixedPrecisionPolicy, ShardPlacementResult

PlacementFn = Callable[[nn.Parameter], Any]

# --- collect -------------------------------------------------------------------------------


class Collected(NamedTuple):
    """A parameter that a unit will manage."""

    fqn: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]  # all modules that hold it, and the attribute in each


def collect(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[Collected]:
    """List the parameters for a unit of ``modules``, a tied parameter once.

    Leaves out submodules to which ``fully_shard`` was applied before, and ``ignored`` parameters.
    Raises a ValueError if a parameter in the list belongs to another unit (as a tied one may).
    """
    found: dict[nn.Parameter, Collected] = {}
    for position, root in enumerate(modules):
        for prefix, module in outside_units(_prefix(position, modules), root, set()):
            for name, param in module._parameters.items():
                if param is None or param in ignored:
                    continue
                if param in _hoisted and _hoisted[param] not in modules:
                    continue
                fqn = joined(prefix, name)
                if param in found:
                    found[param].owners.append((module, name))
                else:
                    found[param] = Collected(fqn, param, [(module, name)])
                    check_free(fqn, param, modules)
    _collect_hoisted(modules, found)
    return list(found.values())


def _prefix(position: int, modules: list[nn.Module]) -> str:
    """Return the prefix of parameter names in ``modules[position]``: "" if it is the only one."""
    return str(position) if len(modules) > 1 else ""


def _spoken(fqn: str, modules: list[nn.Module]) -> str:
    """Return ``fqn`` for an error message, with the class name of its module in front.

    In a unit of several modules, ``fqn`` begins with the position of the module in the list. The
    class name replaces this position.
    """
    position, _, name = fqn.partition(".") if len(modules) > 1 else ("0", "", fqn)
    return joined(own_class(modules[int(position)]).__name__, name)


def check_free(fqn: str, param: nn.Parameter, modules: list[nn.Module]) -> None:
    """Raise a ValueError if ``param`` is a shard of a unit, or a unit has replaced it by one."""
    tag, tagged_fqn = tag_of(param)
    if tag is TensorTag.ORIGINAL:
        raise ValueError(
            f"parameter {_spoken(fqn, modules)!r} is tied to {tagged_fqn!r}, which "
            "another fully_shard has already sharded, so the tie would be cut silently; shard both "
            "in one call: apply fully_shard to their common parent only, pass both modules as a "
            "list, or shard the model by meshard.fully_shard_units, which finds ties."
        )
    owner = owner_of(param)
    if owner is not None:
        own_fqn = owner.params[owner.indices[id(param)]].fqn
        raise ValueError(
            f"parameter {_spoken(fqn, modules)!r} already belongs to a unit (as {own_fqn!r}): "
            "that of a module around this one, or of another module that shares it. Call "
            "fully_shard on children before their parents; what is shared goes to the unit around "
            "all of its uses, as fully_shard_units does it."
        )


def refuse_shared_memory(found: Iterable[Collected], modules: list[nn.Module]) -> None:
    """Raise a ValueError if two parameters share memory: sharding would cut them apart.

    Parameters that are sharded already, in submodules, are compared by the memory that they had
    before. Some overlaps with a parameter that has gaps, such as a column of a matrix, are missed.
    """
    extents = [(extent_of(param), fqn) for fqn, param, _ in found]
    names = {
        module: fqn
        for position, root in enumerate(modules)
        for fqn, module in root.named_modules(prefix=_prefix(position, modules))
    }
    for unit in dict.fromkeys(unit for module in names for unit in units_of(module)):
        for param in unit.params:
            uses = [joined(names[module], name) for module, name in param.owners if module in names]
            extents += [(param.extent, fqn) for fqn in uses[:1]]
    by_storage: dict[object, list[tuple[Extent, str]]] = {}
    for extent, fqn in extents:
        if extent is not None:
            by_storage.setdefault(extent.storage, []).append((extent, fqn))
    for sharing in by_storage.values():
        sharing.sort(key=lambda each: each[0].first)
        for (one, fqn), (other, other_fqn) in itertools.pairwise(sharing):
            # If ``one`` has gaps, ``other`` may begin between two of its elements and share none
            # of them. For example, both are columns of one matrix.
            if other.first == one.first or (other.first < one.end and not one.has_gaps):
                raise ValueError(
                    f"parameters {_spoken(fqn, modules)!r} and {_spoken(other_fqn, modules)!r} "
                    "share memory but are two parameters, so fully_shard would cut them apart "
                    "silently; make them one parameter (head.weight = embedding.weight), or give "
                    "one of them a copy (weight.data = weight.data.clone())."
                )


_hoisted: dict[nn.Parameter, nn.Module] = {}


@contextlib.contextmanager
def hoisting(hoisted: dict[nn.Parameter, nn.Module]) -> Iterator[None]:
    """In this context, put each parameter in ``hoisted`` into the unit of ``hoisted[param]``."""
    _hoisted.update(hoisted)
    try:
        yield
    finally:
        for param in hoisted:
            del _hoisted[param]


def _collect_hoisted(modules: list[nn.Module], found: dict[nn.Parameter, Collected]) -> None:
    """Add parameters that ``hoisting`` reserves for ``modules``, even from sharded submodules."""
    for position, root in enumerate(modules if _hoisted else ()):
        for prefix, module in root.named_modules(prefix=_prefix(position, modules)):
            for name, param in module._parameters.items():
                if param is None or _hoisted.get(param) is not root:
                    continue
                new = Collected(joined(prefix, name), param, [])
                owners = found.setdefault(param, new).owners
                if (module, name) not in owners:
                    owners.append((module, name))


# --- plan ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The parameters of a unit that ``allocate`` will make. One collective will gather them."""

    mesh_info: MeshInfo
    found: list[Collected]  # in the order of the module; may be empty
    params: list[ShardedParam]  # the replacement of each of ``found``


def plan(
    found: Sequence[Collected],
    mesh_info: MeshInfo,
    placement_fn: PlacementFn | None,
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> list[UnitPlan]:
    """Return one plan for each mesh of the parameters in ``found``, and for ``Replicate()`` on it.

    The plan of parameters that are sharded over ``mesh_info`` comes first. If it is empty, it is
    left out, unless there is no other plan.
    """
    plans = {mesh_info: UnitPlan(mesh_info, [], [])}
    # ``plans`` compares MeshInfo objects by identity. ``sharding`` and ``replicating`` keep one
    # object for each mesh, so that all its sharded parameters, and all its replicated ones, get
    # into the same plan.
    sharding = {mesh_info.mesh: mesh_info}
    replicating: dict[MeshInfo, MeshInfo] = {}
    for each in found:
        fqn, param, owners = each
        chosen = None if placement_fn is None else placement_fn(param)
        own_info, chosen = _chosen_mesh_info(fqn, chosen, sharding, mesh_info)
        if type(chosen) is Replicate:
            if own_info not in replicating:
                replicating[own_info] = own_info.replicating_all()
            own_info, chosen = replicating[own_info], None
        shard_dim = _shard_dim(fqn, param, chosen)
        local = plain_of(param)
        if is_plain(local) and has_own_methods(local):
            raise ValueError(
                f"parameter {fqn!r} has fsdp_pre_all_gather or fsdp_post_all_gather set on the "
                "tensor itself, which its shard would not have; set them on the local tensor of "
                "the sharded parameter, after fully_shard."
            )
        if has_gather_methods(fqn, local):
            check_placement(fqn, local, own_info, shard_dim)
        placement = None
        if isinstance(param, DTensor):
            try:
                placement = compose_placement(param, own_info)
            except ValueError as error:
                raise ValueError(f"parameter {fqn!r} is a DTensor already: {error}") from error
        layout = ParamLayout(local.shape, shard_dim, own_info.shard_count)
        unit_plan = plans.setdefault(own_info, UnitPlan(own_info, [], []))
        unit_plan.found.append(each)
        keeps_dtype = policy.keeps_dtype(fqn, param)
        new_param = ShardedParam(fqn, owners, layout, placement, keeps_dtype=keeps_dtype)
        new_param.extent = extent_of(param)
        unit_plan.params.append(new_param)
    check_parameters(found, device_of(mesh_info.mesh))
    in_order = list(plans.values())
    return [each for each in in_order if each.params] or in_order[:1]


def check_parameters(found: Iterable[Collected], device: torch.device) -> None:
    """Raise a ValueError if a parameter cannot be sharded onto ``device``."""
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
        check_dtype(fqn, param)


def check_dtype(fqn: str, param: torch.Tensor) -> None:
    if param.is_complex():
        raise ValueError(
            f"parameter {fqn!r} is {param.dtype}; complex parameters are not supported, "
            "hold torch.view_as_real of it as the parameter."
        )


def resolve_mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> MeshInfo:
    """Return which axes of ``mesh``, which the user gave to ``fully_shard``, shard or replicate."""
    if dims is None:
        return MeshInfo.of(mesh)
    shard, replicate = (
        (names,) if isinstance(names, str) else names or ()
        for names in (dims.shard, dims.replicate)
    )
    return mesh_info_of_named_axes(mesh, shard, replicate)


def _chosen_mesh_info(
    fqn: str, chosen: Any, sharding: dict[DeviceMesh, MeshInfo], default: MeshInfo
) -> tuple[MeshInfo, Any]:
    """Return the mesh (``default`` if it names none) and the placement that ``chosen`` names.

    ``sharding`` has the ``MeshInfo`` of each mesh that has occurred; a new mesh is added.
    """
    if chosen is None or isinstance(chosen, (Shard, Replicate)):
        return default, chosen
    # The user may also return FSDP2's own class ShardPlacementResult, which has the mesh in
    # ``mesh_info.mesh``.
    is_ours = isinstance(chosen, ShardPlacementResult)
    mesh = getattr(chosen if is_ours else getattr(chosen, "mesh_info", None), "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        return default, chosen  # not a placement: _shard_dim raises
    if mesh.device_type != default.mesh.device_type:
        raise ValueError(
            f"shard_placement_fn returned {mesh} for parameter {fqn!r}, but the mesh of the "
            f"unit is on {default.mesh.device_type!r}; use meshes of one device type."
        )
    if mesh not in sharding:
        try:
            sharding[mesh] = MeshInfo.of(mesh)
        except ValueError as error:
            raise ValueError(f"shard_placement_fn for parameter {fqn!r}: {error}") from error
    return sharding[mesh], chosen.placement


def _shard_dim(fqn: str, param: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    # Not isinstance: a subclass of Shard may cut a tensor in another way.
    if type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {fqn!r}; return "
            "torch.distributed.tensor.Shard(dim), Replicate() to keep it unsharded, "
            "meshard.ShardPlacementResult of one of these and a mesh, or None for Shard(0)."
        )
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {fqn!r}, "
            f"which has only {param.dim()} dims."
        )
    return placement.dim % param.dim()


# --- allocate ------------------------------------------------------------------------------


def allocate(
    unit_plan: UnitPlan,
    modules: list[nn.Module],
    *,
    policy: MixedPrecisionPolicy,
    settings: UnitSettings,
    host: MemoryLocation | None = None,
) -> Unit:
    """Return a new unit for ``modules``, with new memory for its shards. Modules do not change.

    Shards are in ``host``, or on the device of the mesh if ``host`` is None. But the shard of a
    parameter on the meta device is on the meta device.
    """
    unit, params, mesh_info = Unit(modules, settings, policy), unit_plan.params, unit_plan.mesh_info
    spec = GroupSpec(mesh_info, device_of(mesh_info.mesh), host)
    originals = [each.param for each in unit_plan.found]
    flags = [original.requires_grad for original in originals]
    locals_ = [plain_of(original).detach() for original in originals]
    unit_params = FlatParams(
        params,
        [_shard_of(each, param.layout, spec) for each, param in zip(locals_, params, strict=True)],
        flags,
        spec=spec,
        mp_policy=policy,
        gradient_hook=gradient_hook_maker(unit),
    )
    for param, original in zip(params, originals, strict=True):
        keep_gradient_dtype(original, param.sharded)
    unit.set_params(unit_params)
    unit.group.record_first_values(locals_)
    return unit


def _shard_of(local: torch.Tensor, layout: ParamLayout, spec: GroupSpec) -> torch.Tensor:
    """Return this rank's shard of ``local``: a view or, with a custom all-gather, a copy.

    A tensor subclass may support no operations but those that FSDP2 uses on shards.
    """
    if not has_class_methods(local):
        return layout.own_part(local, spec.mesh_info.shard_rank)
    chunks = local.chunk(spec.mesh_info.shard_count)
    has_any = spec.mesh_info.shard_rank < len(chunks)
    own = chunks[spec.mesh_info.shard_rank] if has_any else chunks[0].narrow(0, 0, 0)
    copied = own.new_zeros(own.shape)
    copied.copy_(own)
    return copied if copied.is_meta else copied.to(spec.location.device)


# --- commit --------------------------------------------------------------------------------


def commit(
    units: list[Unit], plans: Sequence[UnitPlan], modules: list[nn.Module], base: type, prefix: str
) -> None:
    """Make ``units`` the units of ``modules``, and put the units of submodules inside them.

    ``plans`` has a plan per unit. Each module gets a class that is also a subclass of ``base``,
    named by ``prefix`` and its old class.
    """
    for sibling in units[1:]:
        sibling.mesh_name = _name_of_sibling(sibling)
    unit = nest(units)
    for each, unit_plan in zip(units, plans, strict=True):
        for fqn, original, _ in unit_plan.found:
            # A module outside of ``modules`` may also hold this parameter. It keeps the original,
            # which is not tied to the shard. So the tag makes fully_shard of that module raise.
            tag_tensor(original, TensorTag.ORIGINAL, _spoken(fqn, modules))
        for param in each.params:
            param.install(param.sharded)
    for module in modules:
        adopt_module(module, unit, base, prefix)
    for each in reversed(units):  # outermost last: the pre-hook registered last runs first
        register_hooks(each)
        register_load_hooks(each)
    adopt_inner_units(unit, modules)


def _name_of_sibling(unit: Unit) -> str:
    """Return a label suffix that tells apart units of one module, by their mesh."""
    mesh_info = unit.group.spec.mesh_info
    names, sizes = mesh_info.mesh.mesh_dim_names, mesh_info.mesh.shape
    if names is None:
        axes = "x".join(map(str, sizes))
    else:
        axes = ", ".join(map("{}={}".format, names, sizes))
    how = "on" if mesh_info.shard_axis is not None else "replicated on"
    return f" {how} {axes}"


_classes: dict[tuple[type, type], type] = {}  # (base, class of a module) -> subclass of both


def adopt_module(module: nn.Module, unit: Unit, base: type, prefix: str) -> None:
    """Make ``module`` an instance of ``base`` too, and ``unit`` its unit.

    The name of the module's new class is ``prefix`` followed by the name of its old class.
    """
    original = type(module)
    if (base, original) not in _classes:
        _classes[base, original] = type(prefix + original.__name__, (base, original), {})
    module.__class__ = _classes[base, original]
    # Not by Module.__setattr__, which is slow: it first looks for parameters and modules.
    module.__dict__["_meshard_unit"] = unit


def adopt_inner_units(unit: Unit, modules: list[nn.Module]) -> None:
    """Put ``unit`` and all units inside under a new root; name inner units after their modules.

    If inner units were used before, the new lifecycle is made here, not at the first use. It takes
    over what ``set_is_last_backward`` and ``set_manual_backward_finalization`` have set on them.
    """
    own, inside = with_siblings(unit), _units_inside(unit, modules)
    roots = dict.fromkeys(inner.root for inner in inside)
    used = [root.lifecycle for root in roots if root.lifecycle is not None]
    for lifecycle in used:
        lifecycle.finish_reductions()
    for inner, fqn in inside.items():
        inner.fqn = fqn
        if inner.parent is None:
            own[-1].add_child(inner)
            if inner.settings.unshard_on_access and inner.sibling_of is None:
                for each in with_siblings(inner):
                    for module in modules:
                        register_forward_hooks(each, module, is_around=True)
    units = [*own, *inside]
    specs = [each.group.spec for each in units if each.params]
    groups = (group for spec in specs for group in spec.mesh_info.groups)
    Root(units, _name_root(groups), Lifecycle)
    for lifecycle in used:
        unit.lifecycle.take_modes_of(lifecycle)
    for inner in inside if used else ():
        inner.step = UnitStep()  # forget the unit's progress in a step of its old root
        inner.group.release(Lease.KEPT)


# By group of a mesh: how many roots over it were ever made. Copies are not counted.
# ``_name_root`` numbers roots by this count, alike on all ranks.
_num_roots: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _name_root(groups: Iterable[dist.ProcessGroup]) -> RootNames:
    """Return the name of a new root in each of its groups.

    The name distinguishes units of two models that have the same dotted name. Roots are numbered
    per group, because a rank may have models that other ranks lack, such as a stage of a pipeline.
    All ranks of a group call ``fully_shard`` and ``replicate`` in the same order, so a root gets
    its number in that call. The order of first use would not do: it may differ between ranks, and
    the check is there to find such differences.

    A copy gets no number, because one rank alone may make copies, for example for a moving average
    of the weights. So two copies of one root have the same name.
    """
    names = {}
    for group in set(groups):
        _num_roots[group] = _num_roots.get(group, 0) + 1
        names[group] = f"root {_num_roots[group]}"
    return names


def _units_inside(unit: Unit, modules: list[nn.Module]) -> dict[Unit, str]:
    """Return the units inside the modules of ``unit``, in module order, with their dotted names."""
    inside: dict[Unit, str] = {}
    for position, module in enumerate(modules):
        for fqn, each in module.named_modules(prefix=_prefix(position, modules)):
            for inner in units_of(each):
                inside.setdefault(inner, fqn)
    for own in with_siblings(unit):
        del inside[own]
    return inside
