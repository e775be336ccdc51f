"""Sharding of a whole model by one call: ``fully_shard_units``.

A parameter goes to the innermost of the units that are on every path from the root to the
parameter. For a parameter that is used once, this is the unit around it. For one that is tied, or
in a shared module, it is the innermost unit around all of its uses, so the parameter is unsharded
while any of them runs.

A module may be registered several times, so the model is a graph, and the number of its paths may
be exponential. Paths are never listed. Questions about them are answered by passes over the modules
in an order in which each module comes after those that hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from meshard._engine.build import (
    Collected,
    check_free,
    check_parameters,
    hoisting,
    plan,
    refuse_shared_memory,
    resolve_mesh_info,
)
from meshard._engine.unit import joined, own_class, owned_names, unit_of, without_compile
from meshard._mesh.mesh_info import device_of
from meshard._torch.user_line import warn_user
from meshard.api import as_set, default_mesh, fully_shard, has_forward
from meshard.initialization import refuse_meta, take_values_of_first_rank

UnitPredicate = Callable[[str, nn.Module], bool]
UnitChoice = str | type[nn.Module] | tuple[type[nn.Module], ...] | UnitPredicate
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

    A parameter that is used in several places goes to the innermost unit around all of them. Units
    that exist stay as they are, whatever the arguments.
    **Collective:** every rank, with the same model and arguments.

    Args:
        model: The root, which must have a forward.
        mesh: As for ``fully_shard``.
        units: A module class or a tuple of them; a predicate ``(fqn, module) -> bool``; or
            ``"auto"`` for repeated blocks: children of a ``ModuleList`` or ``Sequential`` that have
            a sibling of their own class, children of a ``ModuleDict`` if several are all of one
            class, and the only child of a ``ModuleList``. Of nested blocks the outermost count.
            If there are no blocks: one unit, and a warning.
        min_params: The fewest elements that a unit may have. A module with fewer stays in the unit
            around it.
        sync_init: First overwrite the parameters that it shards, and all buffers, with those of the
            first rank of the mesh. Without it every rank must hold the same values.
        overrides: Called as ``(fqn, module)`` for every unit, the root (``""``) included; returns
            arguments of ``fully_shard`` that differ for this unit (None: the default), or None. It
            cannot override ``ignored_params``.
        fully_shard_kwargs: All other arguments of ``fully_shard``, for every unit.

    Returns:
        The names of all units, as in ``model.named_modules()`` and in its order: ``""`` is first.
        A unit of several modules has the name of its first.

    Raises:
        TypeError: An argument is unknown to ``fully_shard``.
        ValueError: A class or predicate matches no module, or a parameter cannot be sharded. Or
            with ``sync_init`` a tensor is on the meta device on this rank.
            Arguments for all units, and parameters, are checked before a module is changed, but not
            what ``overrides`` and ``shard_placement_fn`` return.

    >>> import torch
    >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> fully_shard_units(torch.nn.Sequential(block(), block(), torch.nn.Linear(4, 1)))
    ['', '0', '1']
    """
    names = {module: fqn for fqn, module in model.named_modules()}
    holders = _holders_in(model)
    chosen = _choose(names, holders, units)
    if isinstance(model, TorchFSDPModule):
        return _unit_names(model)
    ignored = as_set(fully_shard_kwargs.get("ignored_params"))
    fully_shard_kwargs["ignored_params"] = ignored  # an iterator could be read only once
    planned: Planned = {
        module: []
        for module in reversed(holders)  # inner units first
        if (module in chosen or module is model) and not isinstance(module, TorchFSDPModule)
    }
    free = _free_parameters(names, holders, ignored)
    for fqn, param, _ in free:
        check_free(fqn, param, [model])
    refuse_shared_memory(free, [model])
    _distribute(free, planned, holders, min_params)
    mesh = mesh if mesh is not None else default_mesh()
    for_all = {"mesh": mesh, **fully_shard_kwargs}
    calls = {module: _arguments(names[module], module, for_all, overrides) for module in planned}
    for module, found in planned.items():
        check_parameters(found, device_of(calls[module]["mesh"]))
    if sync_init:
        mesh_info = resolve_mesh_info(mesh, fully_shard_kwargs.get("dp_mesh_dims"))
        params = ((each.fqn, each.param) for found in planned.values() for each in found)
        refuse_meta([*params, *model.named_buffers()])
        for module, found in planned.items():
            _take_values_of_first_rank(found, calls[module])
        take_values_of_first_rank(model.buffers(), mesh_info)
    with hoisting({each.param: module for module, found in planned.items() for each in found}):
        for module in planned:
            fully_shard(module, **calls[module])
    unit_names = _unit_names(model)
    if not chosen and len(unit_names) == 1:
        warn_user(
            f"fully_shard_units found no repeated blocks in this {own_class(model).__name__}, so "
            f"it is one unit, which is unsharded as a whole. {_BLOCKS} Name its classes of "
            "blocks by units=, or call fully_shard(model) if one unit is what you want.",
        )
    return unit_names


def _unit_names(model: nn.Module) -> list[str]:
    names: dict[Any, str] = {}  # a unit of several modules has the name of the first
    for fqn, module in model.named_modules():
        names.setdefault(unit_of(module), fqn)
    names.pop(None, None)
    return list(names.values())


def _take_values_of_first_rank(found: list[Collected], arguments: dict[str, Any]) -> None:
    mesh_info = resolve_mesh_info(arguments["mesh"], arguments.get("dp_mesh_dims"))
    for each in plan(found, mesh_info, arguments.get("shard_placement_fn")):
        # Only the ranks of these parameters' own mesh take the values of its first rank. Ranks
        # outside of that mesh may hold other experts.
        take_values_of_first_rank([own.param for own in each.found], each.mesh_info)


# --- the model as a graph --------------------------------------------------------------------

Holders = dict[nn.Module, list[nn.Module]]  # module -> its holders; these come first
Planned = dict[nn.Module, list[Collected]]  # the parameters of each unit, with all their uses


def _holders_in(model: nn.Module) -> Holders:
    holders: Holders = {module: [] for module in model.modules()}
    for module in holders:
        for child in module.children():
            holders[child].append(module)
    return {module: holders[module] for module in TopologicalSorter(holders).static_order()}


def _outside(kind: type, holders: Holders) -> set[nn.Module]:
    """Return the modules that some path from the root reaches without passing a ``kind``.

    A module of that kind itself is not among them.
    """
    found: set[nn.Module] = set()
    for module, around in holders.items():
        if not isinstance(module, kind) and (not around or not found.isdisjoint(around)):
            found.add(module)
    return found


def _in_all(chains: list[list[nn.Module]]) -> list[nn.Module]:
    return [module for module in chains[0] if all(module in chain for chain in chains[1:])]


# --- choice of modules -----------------------------------------------------------------------

_BLOCKS = (
    "('auto' takes repeated blocks: two or more children of one class in a ModuleList, Sequential "
    "or ModuleDict (which must hold no others), and the only child of a ModuleList.)"
)


def _choose(names: dict[nn.Module, str], holders: Holders, units: Any) -> set[nn.Module]:
    is_auto = isinstance(units, str) and units == "auto"
    wanted = _repeated_blocks(holders) if is_auto else _matching(names, units)
    # nn.MultiheadAttention reads the weights of its children instead of calling them.
    reached = _outside(nn.MultiheadAttention, holders)
    chosen = {
        module
        for module in wanted
        if has_forward(module) and not reached.isdisjoint(holders[module])
    }
    if chosen or is_auto:
        return chosen
    root, *inside = (own_class(module).__name__ for module in names)
    raise ValueError(
        f"units={units!r} matches no module with a forward inside {root}; the classes inside are "
        f"{', '.join(sorted(set(inside))) or 'none'}. {_BLOCKS} Choose others, or call "
        "fully_shard(model) to make it one unit."
    )


def _matching(names: dict[nn.Module, str], units: Any) -> set[nn.Module]:
    classes = units if isinstance(units, tuple) else (units,)
    if classes and all(isinstance(each, type) for each in classes):
        return {module for module in names if isinstance(module, classes)}
    return {module for module, fqn in names.items() if units(fqn, module)}


def _repeated_blocks(holders: Holders) -> set[nn.Module]:
    """Return the outermost children of lists and sequences that have a sibling of their class.

    A ``ModuleList`` holds blocks even if there is only one. A ``Sequential`` of different modules
    may itself be one block. The entries of a ``ModuleDict`` are often different parts of a model;
    they count as blocks only if all are of one class. Of what ``torch.compile(block)`` returns, the
    block inside counts.
    """
    found: set[nn.Module] = set()
    outside: set[nn.Module] = set()
    for module, around in holders.items():
        if module in found or (around and outside.isdisjoint(around)):
            continue
        outside.add(module)
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        by_class: dict[type, set[nn.Module]] = {}
        for child in map(without_compile, module.children()):
            if next(child.parameters(), None) is not None:
                by_class.setdefault(own_class(child), set()).add(child)
        if isinstance(module, nn.ModuleDict) and len(by_class) > 1:
            continue
        is_single = isinstance(module, nn.ModuleList) and len(module) == 1  # a model of one layer
        for same in by_class.values():
            if len(same) > 1 or is_single:
                found.update(child for child in same if has_forward(child))
    return found


# --- distribution of parameters ----------------------------------------------------------------


def _free_parameters(
    names: dict[nn.Module, str], holders: Holders, ignored: set[nn.Parameter]
) -> list[Collected]:
    """Return the parameters that are to be sharded."""
    owned = owned_names(next(iter(names)))
    found: dict[nn.Parameter, Collected] = {}
    for module, fqn in names.items():
        for name, param in module._parameters.items():
            if param is not None and param not in ignored and (module, name) not in owned:
                new = Collected(joined(fqn, name), param, [])
                found.setdefault(param, new).owners.append((module, name))
    # A parameter is left out if all modules that hold it are inside modules that are sharded
    # already. An earlier fully_shard has not sharded it: it was told to ignore it, or the parameter
    # was added to the module later.
    free = _outside(TorchFSDPModule, holders)
    return [each for each in found.values() if any(owner in free for owner, _ in each.owners)]


def _distribute(
    params: list[Collected], planned: Planned, holders: Holders, min_params: int
) -> None:
    """Give every parameter to a planned unit, and remove units that are too small."""
    around: dict[nn.Module, list[nn.Module]] = {}  # what is on all paths from the root to a module
    for module, outer in holders.items():
        around[module] = [*(_in_all([around[each] for each in outer]) if outer else ()), module]

    def give(found: list[Collected]) -> None:
        for each in found:
            outer = _in_all([around[owner] for owner, _ in each.owners])
            planned[next(each for each in reversed(outer) if each in planned)].append(each)

    give(params)
    *inner, _ = planned
    for module in inner:
        if sum(each.param.numel() for each in planned[module]) < max(min_params, 1):
            give(planned.pop(module))


def _arguments(
    fqn: str, module: nn.Module, for_all: dict[str, Any], overrides: Overrides | None
) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` for one unit; None stands for the default."""
    own = (overrides(fqn, module) if overrides is not None else None) or {}
    chosen = {name: value for name, value in {**for_all, **own}.items() if value is not None}
    return {"mesh": for_all["mesh"], **chosen}
