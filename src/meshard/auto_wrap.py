"""Sharding of a whole model by one call.

Looks at a model and changes nothing. A parameter belongs to the innermost unit that every way from
the root to the parameter passes through: for one that is used once, that is the unit around it; for
tied parameters and shared modules it is the lowest unit that contains all their users, which is
whole while any of them runs.
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
    ShardSpecResolver,
    check_parameters,
    hoisting,
    resolve_mesh_info,
)
from meshard._engine.unit import own_class, unit_of, units_in
from meshard._mesh.mesh_info import device_of
from meshard.api import default_mesh, fully_shard
from meshard.diagnostics import is_too_narrow_to_step
from meshard.initialization import take_values_of_first_rank

UnitPredicate = Callable[[str, nn.Module], bool]
UnitChoice = str | type[nn.Module] | tuple[type[nn.Module], ...] | UnitPredicate

# It reads the weights of its output projection instead of calling it.
_READS_ITS_CHILDREN = nn.MultiheadAttention


class Way(NamedTuple):
    """One way from the root to a module; a module that is registered twice has two."""

    fqn: str
    path: tuple[nn.Module, ...]  # from the root to the module

    @property
    def module(self) -> nn.Module:
        """The module at the end."""
        return self.path[-1]


@dataclass(slots=True)
class PlannedUnit:
    """A module that is to become a unit."""

    fqn: str
    module: nn.Module
    params: dict[nn.Parameter, str] = field(default_factory=dict)  # with their names in the model


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What is to be sharded, and how."""

    units: list[PlannedUnit]  # bottom-up
    hoisted: dict[nn.Parameter, nn.Module]  # to a unit that is not the innermost around each use


def plan_units(
    model: nn.Module, units: Any, *, min_params: int, ignored: set[nn.Parameter]
) -> UnitPlan:
    """Decide what ``fully_shard_units`` does; see there for the arguments.

    Raises:
        TypeError: ``units`` is nothing that chooses modules.
        ValueError: ``units`` chooses nothing, or is a string that is not ``"auto"``.
    """
    ways = list(_ways_to_modules("", (model,)))
    chosen = _choose(ways, units)
    if isinstance(model, TorchFSDPModule):
        return UnitPlan([], {})
    # Inner units first. A shared module has its last place after all modules that contain it.
    last = {way.module: position for position, way in enumerate(ways)}
    names = {way.module: way.fqn for way in reversed(ways)}
    planned = {
        module: PlannedUnit(names[module], module)
        for module in sorted(chosen | {model}, key=last.__getitem__, reverse=True)
        if not isinstance(module, TorchFSDPModule)
    }
    used = _free_parameters(model, ways, ignored)
    _hand_out(used, model, planned, min_params)
    taker = {param: unit.module for unit in planned.values() for param in unit.params}
    hoisted = {
        param: taker[param]
        for param, uses in used.items()
        if any(_innermost(use, planned) is not taker[param] for use in uses)
    }
    return UnitPlan(list(planned.values()), hoisted)


def _hand_out(
    used: dict[nn.Parameter, list[Way]],
    root: nn.Module,
    planned: dict[nn.Module, PlannedUnit],
    min_params: int,
) -> None:
    """Give every parameter to a unit, and remove the units that get too little."""
    takers = {param: _takers(uses, planned) for param, uses in used.items()}
    inside: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in planned}
    for param, modules in takers.items():
        planned[modules[-1]].params[param] = used[param][0].fqn
        for module in modules:
            inside[module].append(param)
    for module, unit in list(planned.items()):
        if module is not root and _numel(unit) < max(min_params, 1):
            del planned[module]
            for param in inside[module]:
                takers[param].remove(module)
            for param, fqn in unit.params.items():
                planned[takers[param][-1]].params[param] = fqn


def unit_names(model: nn.Module) -> list[str]:
    """Return the names of all units in ``model``, in module order."""
    names, seen = [], set()
    for fqn, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None and unit not in seen:
            seen.add(unit)
            names.append(fqn)
    return names


def _numel(unit: PlannedUnit) -> int:
    return sum(param.numel() for param in unit.params)


def _ways_to_modules(fqn: str, path: tuple[nn.Module, ...]) -> Iterator[Way]:
    yield Way(fqn, path)
    for name, child in path[-1]._modules.items():
        if child is not None and child not in path:
            yield from _ways_to_modules(f"{fqn}.{name}" if fqn else name, (*path, child))


# --- which modules ---------------------------------------------------------------------------


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: a ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward


def _choose(ways: list[Way], units: Any) -> set[nn.Module]:
    is_auto = isinstance(units, str) and units == "auto"
    wanted = _repeated_blocks(ways) if is_auto else _matching(ways, units)
    chosen = {
        way.module
        for way in ways
        if way.module in wanted
        and has_forward(way.module)
        and not any(isinstance(outer, _READS_ITS_CHILDREN) for outer in way.path[:-1])
    }
    if chosen - {ways[0].module}:
        return chosen
    root = own_class(ways[0].module).__name__
    if is_auto:
        raise ValueError(
            f"units='auto' found no repeated blocks in {root} (two or more children of one class "
            "in a ModuleList or Sequential); pass a module class, a tuple of classes or a "
            "predicate (fqn, module) -> bool as units, or call fully_shard(model) to make it one "
            "unit."
        )
    without = sorted({own_class(module).__name__ for module in wanted if not has_forward(module)})
    reason = f" ({', '.join(without)} has no forward, so it cannot be a unit)" if without else ""
    classes = sorted({own_class(way.module).__name__ for way in ways[1:]})
    raise ValueError(
        f"units={units!r} matches no module inside {root}{reason}; the classes inside are "
        f"{', '.join(classes) or 'none'}."
    )


def _matching(ways: list[Way], units: Any) -> set[nn.Module]:
    if isinstance(units, str):
        raise ValueError(
            f"units={units!r} is not known; pass 'auto', a module class, a tuple of classes or a "
            "predicate (fqn, module) -> bool."
        )
    classes = units if isinstance(units, tuple) else (units,)
    if classes and all(isinstance(each, type) for each in classes):
        return {way.module for way in ways if isinstance(way.module, classes)}
    if isinstance(units, tuple) or not callable(units):
        raise TypeError(
            "units must be 'auto', a module class, a tuple of classes or a predicate "
            f"(fqn, module) -> bool, got {units!r}."
        )
    return {way.module for way in ways if units(way.fqn, way.module)}


def _repeated_blocks(ways: list[Way]) -> set[nn.Module]:
    """Return the outermost children of lists and sequences that have a sibling of their class."""
    found: set[nn.Module] = set()
    for way in ways:
        if not isinstance(way.module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(outer in found for outer in way.path):
            continue
        by_class: dict[type, set[nn.Module]] = {}
        for child in way.module.children():
            if has_forward(child) and next(child.parameters(), None) is not None:
                by_class.setdefault(own_class(child), set()).add(child)
        found.update(*(same for same in by_class.values() if len(same) > 1))
    return found


# --- which parameters ------------------------------------------------------------------------


def _free_parameters(
    model: nn.Module, ways: list[Way], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, list[Way]]:
    """Return every parameter that is to be sharded, with the ways to the modules that hold it."""
    taken = {
        (owner(), name)
        for unit in units_in(model)
        if unit.group is not None
        for param in unit.group.params
        for owner, name in param.owners
    }
    found: dict[nn.Parameter, list[Way]] = {}
    for way in ways:
        for name, param in way.module._parameters.items():
            if param is None or param in ignored or (way.module, name) in taken:
                continue
            fqn = f"{way.fqn}.{name}" if way.fqn else name
            found.setdefault(param, []).append(Way(fqn, way.path))
    # What an earlier fully_shard of its own left out on purpose stays out.
    return {p: uses for p, uses in found.items() if not all(map(_is_in_unit, uses))}


def _is_in_unit(use: Way) -> bool:
    return any(isinstance(module, TorchFSDPModule) for module in use.path)


def _takers(uses: list[Way], planned: dict[nn.Module, PlannedUnit]) -> list[nn.Module]:
    """Return the modules that may take a parameter, from the root inwards."""
    shared = set(uses[0].path).intersection(*(use.path for use in uses[1:]))
    return [module for module in uses[0].path if module in shared and module in planned]


def _innermost(use: Way, planned: dict[nn.Module, PlannedUnit]) -> nn.Module:
    around = (m for m in reversed(use.path) if m in planned or isinstance(m, TorchFSDPModule))
    return next(around)


Overrides = Callable[[str, nn.Module], "dict[str, Any] | None"]


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

    Modules that cannot be units are never made units: lists and dicts without a forward, what is
    inside ``nn.MultiheadAttention`` (it reads the weights of its children instead of calling
    them), and modules that have no parameters left. A parameter that is used in several places,
    because it is tied or in a shared module, goes to the innermost unit around all of them. Units
    that exist already stay as they are, so a second call changes nothing.

    **Collective:** every rank of the mesh, with the same model and the same arguments.

    Args:
        model: The root.
        mesh: As for ``fully_shard``.
        units: A module class or a tuple of them; a predicate ``(fqn, module) -> bool``; or
            ``"auto"``: the outermost repeated blocks, which are the children of a ``ModuleList``
            or ``Sequential`` that have a sibling of their own class.
        min_params: Units that would own fewer elements than this are left to the unit around.
        sync_init: First overwrite parameters and buffers by those of the first rank of the mesh,
            one tensor at a time. Without it every rank must bring the same values.
        overrides: Called as ``(fqn, module)`` for every unit, the root included (its name is
            ``""``); returns arguments of ``fully_shard`` that differ for this unit, or None.
        fully_shard_kwargs: All other arguments of ``fully_shard``, for every unit.

    Returns:
        The names of all units in the order of ``model.named_modules()``, each good for
        ``model.get_submodule(name)``. The root comes first; its name is ``""`` (tables and
        ledgers show it as ``(root)``).

    Raises:
        TypeError: An argument is of the wrong type, or unknown to ``fully_shard``.
        ValueError: ``units`` matches no module, or a parameter cannot be sharded. What is wrong
            with arguments for all units, or with parameters, is found before anything is changed.

    >>> import torch
    >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> model = torch.nn.Sequential(block(), block(), torch.nn.Linear(4, 1))
    >>> fully_shard_units(model)
    ['', '0', '1']
    """
    _check_arguments(model, mesh, min_params, fully_shard_kwargs)
    ignored = set(fully_shard_kwargs.get("ignored_params") or ())
    plan = plan_units(model, units, min_params=min_params, ignored=ignored)
    if not plan.units:
        return unit_names(model)
    mesh = mesh if mesh is not None else default_mesh()
    arguments = [
        {"mesh": mesh, **fully_shard_kwargs, **_overrides_of(unit, overrides)}
        for unit in plan.units
    ]
    for unit, chosen in zip(plan.units, arguments, strict=True):
        found = [Collected(fqn, param, []) for param, fqn in unit.params.items()]
        check_parameters(found, device_of(chosen["mesh"]))
    if sync_init:
        _take_values_of_first_rank(plan.units, arguments)
        mesh_info = resolve_mesh_info(mesh, fully_shard_kwargs.get("dp_mesh_dims"))
        take_values_of_first_rank(model.named_buffers(), mesh_info, device_of(mesh))
    _warn_about_narrow(plan.units)
    with hoisting(plan.hoisted):
        for unit, chosen in zip(plan.units, arguments, strict=True):
            fully_shard(unit.module, **chosen)
    return unit_names(model)


_FULLY_SHARD_ARGUMENTS = frozenset(inspect.signature(fully_shard).parameters) - {"module"}


def _check_arguments(
    model: nn.Module, mesh: DeviceMesh | None, min_params: int, kwargs: dict[str, Any]
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fully_shard_units needs an nn.Module, got {type(model).__name__}.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {type(mesh).__name__}.")
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


def _take_values_of_first_rank(units: list[PlannedUnit], arguments: list[dict[str, Any]]) -> None:
    for unit, chosen in zip(units, arguments, strict=True):
        mesh_info = resolve_mesh_info(chosen["mesh"], chosen.get("dp_mesh_dims"))
        resolver = ShardSpecResolver(mesh_info, chosen.get("shard_placement_fn"))
        for param, fqn in unit.params.items():
            # Of its own mesh: experts on another mesh differ over this one.
            own = resolver.resolve(fqn, param).mesh_info
            take_values_of_first_rank([(fqn, param)], own, device_of(own.mesh))


def _warn_about_narrow(units: list[PlannedUnit]) -> None:
    """Say so if an optimizer would step in less than float32."""
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
