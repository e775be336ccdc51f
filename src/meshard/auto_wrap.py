"""Sharding of a whole model by one call: ``fully_shard_units``.

A parameter belongs to the innermost unit on every path from the root to the parameter. For one that
is used once, that is the unit around it. For tied parameters and shared modules it is the lowest
unit that contains all their users, and which is unsharded while any of them runs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from meshard._engine.build import (
    Collected,
    check_parameters,
    hoisting,
    plan,
    resolve_mesh_info,
)
from meshard._engine.unit import own_class, owned_names, unit_of
from meshard._mesh.mesh_info import device_of
from meshard.api import check_mesh, default_mesh, fully_shard, has_forward
from meshard.diagnostics import is_too_narrow_to_step
from meshard.initialization import take_values_of_first_rank

UnitPredicate = Callable[[str, nn.Module], bool]
UnitChoice = str | type[nn.Module] | tuple[type[nn.Module], ...] | UnitPredicate
Overrides = Callable[[str, nn.Module], "dict[str, Any] | None"]

# --- plan ----------------------------------------------------------------------------------


class ModulePath(NamedTuple):
    """One path from the root to a module; a module that is registered twice has two."""

    fqn: str
    modules: tuple[nn.Module, ...]  # from the root to the module

    @property
    def module(self) -> nn.Module:
        """The module at the end."""
        return self.modules[-1]


@dataclass(slots=True)
class PlannedUnit:
    """A module that is to become a unit."""

    fqn: str
    module: nn.Module
    params: dict[nn.Parameter, str] = field(default_factory=dict)  # with their names in the model


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """The units that a model is to get."""

    units: list[PlannedUnit]  # bottom-up
    hoisted: dict[nn.Parameter, nn.Module]  # to a unit that is not the innermost around each use


def plan_units(
    model: nn.Module, units: Any, *, min_params: int, ignored: set[nn.Parameter]
) -> WrapPlan:
    """Choose the units of a model, without changing it. For the arguments: ``fully_shard_units``.

    Raises:
        TypeError: ``units`` is nothing that chooses modules.
        ValueError: ``units`` chooses nothing, or is a string that is not ``"auto"``.
    """
    paths = list(_paths_to_modules("", (model,)))
    chosen = _choose(paths, units)
    if isinstance(model, TorchFSDPModule):
        return WrapPlan([], {})
    # Inner units first. The last position of a shared module is after all modules that contain it.
    last = {path.module: position for position, path in enumerate(paths)}
    names = {path.module: path.fqn for path in reversed(paths)}
    planned = {
        module: PlannedUnit(names[module], module)
        for module in sorted(chosen | {model}, key=last.__getitem__, reverse=True)
        if not isinstance(module, TorchFSDPModule)
    }
    uses = _uses_of_free_parameters(model, paths, ignored)
    _distribute(uses, model, planned, min_params)
    owner = {param: unit.module for unit in planned.values() for param in unit.params}
    hoisted = {
        param: owner[param]
        for param, paths_to_users in uses.items()
        if any(_innermost_unit(path, planned) is not owner[param] for path in paths_to_users)
    }
    return WrapPlan(list(planned.values()), hoisted)


def _paths_to_modules(fqn: str, modules: tuple[nn.Module, ...]) -> Iterator[ModulePath]:
    yield ModulePath(fqn, modules)
    for name, child in modules[-1]._modules.items():
        if child is not None and child not in modules:
            yield from _paths_to_modules(f"{fqn}.{name}" if fqn else name, (*modules, child))


# --- choice of modules ---------------------------------------------------------------------


def _choose(paths: list[ModulePath], units: Any) -> set[nn.Module]:
    is_auto = isinstance(units, str) and units == "auto"
    wanted = _repeated_blocks(paths) if is_auto else _matching(paths, units)
    chosen = {
        path.module
        for path in paths
        if path.module in wanted
        and has_forward(path.module)
        and not any(isinstance(outer, nn.MultiheadAttention) for outer in path.modules[:-1])
    }
    if chosen - {paths[0].module}:
        return chosen
    root = own_class(paths[0].module).__name__
    if is_auto:
        raise ValueError(
            f"units='auto' found no repeated blocks in {root} (two or more children of one class "
            "in a ModuleList or Sequential); pass a module class, a tuple of classes or a "
            "predicate (fqn, module) -> bool as units, or call fully_shard(model) to make it one "
            "unit."
        )
    without = sorted({own_class(module).__name__ for module in wanted if not has_forward(module)})
    reason = f" ({', '.join(without)} has no forward, so it cannot be a unit)" if without else ""
    classes = sorted({own_class(path.module).__name__ for path in paths[1:]})
    raise ValueError(
        f"units={units!r} matches no module inside {root}{reason}; the classes inside are "
        f"{', '.join(classes) or 'none'}."
    )


def _matching(paths: list[ModulePath], units: Any) -> set[nn.Module]:
    if isinstance(units, str):
        raise ValueError(
            f"units={units!r} is not known; pass 'auto', a module class, a tuple of classes or a "
            "predicate (fqn, module) -> bool."
        )
    classes = units if isinstance(units, tuple) else (units,)
    if classes and all(isinstance(each, type) for each in classes):
        return {path.module for path in paths if isinstance(path.module, classes)}
    if isinstance(units, tuple) or not callable(units):
        raise TypeError(
            "units must be 'auto', a module class, a tuple of classes or a predicate "
            f"(fqn, module) -> bool, got {units!r}."
        )
    return {path.module for path in paths if units(path.fqn, path.module)}


def _repeated_blocks(paths: list[ModulePath]) -> set[nn.Module]:
    """Return the outermost children of lists and sequences that have a sibling of their class."""
    found: set[nn.Module] = set()
    for path in paths:
        if not isinstance(path.module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(outer in found for outer in path.modules):
            continue
        by_class: dict[type, set[nn.Module]] = {}
        for child in path.module.children():
            if has_forward(child) and next(child.parameters(), None) is not None:
                by_class.setdefault(own_class(child), set()).add(child)
        found.update(*(same for same in by_class.values() if len(same) > 1))
    return found


# --- distribution of parameters ------------------------------------------------------------


def _uses_of_free_parameters(
    model: nn.Module, paths: list[ModulePath], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, list[ModulePath]]:
    """Return every parameter that is to be sharded, with its name and path from each user."""
    owned = owned_names(model)
    found: dict[nn.Parameter, list[ModulePath]] = {}
    for path in paths:
        for name, param in path.module._parameters.items():
            if param is None or param in ignored or (path.module, name) in owned:
                continue
            fqn = f"{path.fqn}.{name}" if path.fqn else name
            found.setdefault(param, []).append(ModulePath(fqn, path.modules))
    # A parameter that an earlier fully_shard has ignored stays ignored.
    return {param: uses for param, uses in found.items() if not all(map(_is_in_unit, uses))}


def _is_in_unit(use: ModulePath) -> bool:
    return any(isinstance(module, TorchFSDPModule) for module in use.modules)


def _distribute(
    uses: dict[nn.Parameter, list[ModulePath]],
    root: nn.Module,
    planned: dict[nn.Module, PlannedUnit],
    min_params: int,
) -> None:
    """Give every parameter to a unit, and remove the units that are too small."""
    candidates = {param: _candidates(paths, planned) for param, paths in uses.items()}
    inside: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in planned}
    for param, modules in candidates.items():
        planned[modules[-1]].params[param] = uses[param][0].fqn
        for module in modules:
            inside[module].append(param)
    for module, unit in list(planned.items()):
        num_elements = sum(param.numel() for param in unit.params)
        if module is not root and num_elements < max(min_params, 1):
            del planned[module]
            for param in inside[module]:
                candidates[param].remove(module)
            for param, fqn in unit.params.items():
                planned[candidates[param][-1]].params[param] = fqn


def _candidates(uses: list[ModulePath], planned: dict[nn.Module, PlannedUnit]) -> list[nn.Module]:
    """Return the planned modules around all uses of a parameter, from the root inwards."""
    shared = set(uses[0].modules).intersection(*(use.modules for use in uses[1:]))
    return [module for module in uses[0].modules if module in shared and module in planned]


def _innermost_unit(use: ModulePath, planned: dict[nn.Module, PlannedUnit]) -> nn.Module:
    around = (m for m in reversed(use.modules) if m in planned or isinstance(m, TorchFSDPModule))
    return next(around)


def unit_names(model: nn.Module) -> list[str]:
    """Return the names of all units in ``model``, in module order."""
    names, seen = [], set()
    for fqn, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None and unit not in seen:
            seen.add(unit)
            names.append(fqn)
    return names


# --- public --------------------------------------------------------------------------------


def fully_shard_units(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: UnitChoice = "auto",
    min_params: int = 0,
    sync_init: bool = False,
    overrides: Overrides | None = None,
    **fully_shard_kwargs: Any,
) -> list[str]:
    """Apply ``fully_shard`` bottom-up to the chosen modules inside ``model``, and to ``model``.

    Never made units are lists and dicts without a forward, modules inside
    ``nn.MultiheadAttention`` (which reads the weights of its children instead of calling them), and
    modules that have no parameters left. A parameter that is used in several places, because it is
    tied or in a shared module, goes to the innermost unit around all of them. Units that exist
    stay as they are, so a second call changes nothing.

    **Collective:** every rank of the mesh, with the same model and the same arguments.

    Args:
        model: The root.
        mesh: As for ``fully_shard``.
        units: A module class or a tuple of them; a predicate ``(fqn, module) -> bool``; or
            ``"auto"``: the outermost repeated blocks, which are the children of a ``ModuleList``
            or ``Sequential`` that have a sibling of their own class.
        min_params: Fewest elements of a unit; smaller ones become part of the unit around them.
        sync_init: Overwrite parameters and buffers by those of the first rank of the mesh first,
            one tensor at a time. Without it every rank must hold the same values.
        overrides: Called as ``(fqn, module)`` for every unit, the root included (its name is
            ``""``); returns arguments of ``fully_shard`` that differ for this unit, or None.
        fully_shard_kwargs: All other arguments of ``fully_shard``, for every unit.

    Returns:
        The names of all units in the order of ``model.named_modules()``, each good for
        ``model.get_submodule(name)``. The root comes first; its name is ``""`` (tables and
        ledgers show it as ``(root)``).

    Raises:
        TypeError: An argument is of the wrong type, or unknown to ``fully_shard``.
        ValueError: ``units`` matches no module, or a parameter cannot be sharded. Arguments for all
            units, and parameters, are checked before anything is changed.

    >>> import torch
    >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> model = torch.nn.Sequential(block(), block(), torch.nn.Linear(4, 1))
    >>> fully_shard_units(model)
    ['', '0', '1']
    """
    _check_arguments(model, mesh, min_params, fully_shard_kwargs)
    ignored = set(fully_shard_kwargs.get("ignored_params") or ())
    wrap_plan = plan_units(model, units, min_params=min_params, ignored=ignored)
    if not wrap_plan.units:
        return unit_names(model)
    mesh = mesh if mesh is not None else default_mesh()
    arguments = [
        {"mesh": mesh, **fully_shard_kwargs, **_overrides_of(unit, overrides)}
        for unit in wrap_plan.units
    ]
    for unit, chosen in zip(wrap_plan.units, arguments, strict=True):
        check_parameters(_collected(unit), device_of(chosen["mesh"]))
    if sync_init:
        _take_values_of_first_rank(wrap_plan.units, arguments)
        mesh_info = resolve_mesh_info(mesh, fully_shard_kwargs.get("dp_mesh_dims"))
        take_values_of_first_rank(model.named_buffers(), mesh_info, device_of(mesh))
    _warn_about_narrow(wrap_plan.units)
    with hoisting(wrap_plan.hoisted):
        for unit, chosen in zip(wrap_plan.units, arguments, strict=True):
            fully_shard(unit.module, **chosen)
    return unit_names(model)


def _collected(unit: PlannedUnit) -> list[Collected]:
    return [Collected(fqn, param, []) for param, fqn in unit.params.items()]


def _take_values_of_first_rank(units: list[PlannedUnit], arguments: list[dict[str, Any]]) -> None:
    for unit, chosen in zip(units, arguments, strict=True):
        mesh_info = resolve_mesh_info(chosen["mesh"], chosen.get("dp_mesh_dims"))
        specs = {
            each.param: unit_plan.mesh_info
            for unit_plan in plan(_collected(unit), mesh_info, chosen.get("shard_placement_fn"))
            for each in unit_plan.found
        }
        for param, fqn in unit.params.items():
            # Over the parameter's own mesh: experts on another mesh differ over this one.
            own = specs[param]
            take_values_of_first_rank([(fqn, param)], own, device_of(own.mesh))


# --- checks --------------------------------------------------------------------------------

_FULLY_SHARD_ARGUMENTS = frozenset(inspect.signature(fully_shard).parameters) - {"module"}


def _check_arguments(
    model: nn.Module, mesh: DeviceMesh | None, min_params: int, kwargs: dict[str, Any]
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fully_shard_units needs an nn.Module, got {type(model).__name__}.")
    check_mesh(mesh)
    if isinstance(min_params, bool) or not isinstance(min_params, int):
        raise TypeError(f"min_params must be an int, got {min_params!r}.")
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and not has_forward(model):
        raise ValueError(
            f"the root is a {type(model).__name__}, which has no forward to gather parameters "
            "for; pass the module around it."
        )
    unknown = sorted(set(kwargs) - _FULLY_SHARD_ARGUMENTS)
    if unknown:
        raise TypeError(f"fully_shard_units got {unknown}, which fully_shard does not know.")


def _overrides_of(unit: PlannedUnit, overrides: Overrides | None) -> dict[str, Any]:
    chosen = overrides(unit.fqn, unit.module) if overrides is not None else None
    if chosen is None:
        return {}
    if not isinstance(chosen, dict):
        raise TypeError(f"overrides returned {chosen!r} for unit {unit.fqn!r}; return a dict.")
    unknown = sorted(set(chosen) - _FULLY_SHARD_ARGUMENTS | set(chosen) & {"ignored_params"})
    if unknown:
        raise TypeError(
            f"overrides returned {unknown} for unit {unit.fqn!r}; return arguments of fully_shard "
            "only, and pass ignored_params for the whole model."
        )
    return chosen


def _warn_about_narrow(units: list[PlannedUnit]) -> None:
    """Warn if an optimizer would step in less than float32."""
    narrow = [
        (fqn, param)
        for unit in units
        for param, fqn in unit.params.items()
        if param.requires_grad and is_too_narrow_to_step(param.dtype)
    ]
    if narrow:
        fqn, param = narrow[0]
        warnings.warn(
            f"{len(narrow)} trainable parameters, the first is {fqn!r}, are {param.dtype}: an "
            "optimizer that steps them rounds small updates away. Leave them in float32 and pass "
            f"mp_policy=MixedPrecisionPolicy(param_dtype={param.dtype}), which computes and "
            "gathers the same, or set requires_grad to False if they are not trained.",
            stacklevel=3,
        )
