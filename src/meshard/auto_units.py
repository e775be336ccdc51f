"""How is a whole model sharded by one call?"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshard._geometry.mesh_roles import device_of
from meshard.api import default_mesh, fully_shard
from meshard.build_unit import Collected, check_parameters, hoisting
from meshard.placing import Placer, roles_of
from meshard.same_start import take_values_of_first_rank
from meshard.unit_plan import PlannedUnit, UnitChoice, has_forward, plan_units, unit_names
from meshard.unit_table import is_too_narrow_to_step

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
        roles = roles_of(mesh, fully_shard_kwargs.get("dp_mesh_dims"))
        take_values_of_first_rank(model.named_buffers(), roles, device_of(mesh))
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
        roles = roles_of(chosen["mesh"], chosen.get("dp_mesh_dims"))
        placer = Placer(roles, chosen.get("shard_placement_fn"))
        for param, fqn in unit.params.items():
            # Of its own mesh: experts on another mesh differ over this one.
            own = placer.place(fqn, param).roles
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
