"""Pickles of modules with units: plain modules, which load without meshard."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshard._engine.unit import Unit, own_class, units_of
from meshard._params.replicated_params import ReplicatedParams
from meshard._torch.private import composable_keys

FORWARD_METHODS = "_meshard_forward_methods"  # on a module: name -> its own method, or None
_HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]  # dicts with the same keys


def check_may_pickle(unit: Unit | None) -> None:
    """Raise unless modules of ``unit`` hold unsharded parameters. None: the unit is gone."""
    name = "a unit that is gone"
    if unit is not None:
        group, name = unit.group, f"unit {unit.label!r}"
        unit.lifecycle.check_between_steps(unit, "pickle")
        group.finish_pending_step()
        group.check_nothing_is_pending()
        if not group.params or isinstance(group.storage, ReplicatedParams):
            return
        is_first = group.spec.mesh_info.is_first_rank
        if group.is_summoned and (is_first or not group.summoned_by.rank0_only):
            return
    raise TypeError(
        f"a module of {name} cannot be pickled here: this rank has shards of its parameters. "
        "Pickle it inside meshard.unsharded_params(module), as a plain module; or save its "
        "state_dict() (shards with torch.distributed.checkpoint, or unsharded by "
        "get_model_state_dict with full_state_dict=True)."
    )


def reduce_as_plain(module: nn.Module) -> Any:
    """Return what pickles ``module`` as an instance of its own class, without unit and hooks."""
    for unit in units_of(module):
        check_may_pickle(unit)
    plain: nn.Module = object.__new__(own_class(module))  # its class may pickle in its own way
    plain.__dict__.update(_plain_state(module))
    # The later protocols refuse an object of another class than that of ``module``.
    return plain.__reduce_ex__(1)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    state = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_meshard_") and name not in composable_keys
    }
    for name, method in vars(module).get(FORWARD_METHODS, {}).items():
        if method is not None:
            state[name] = method
    ours = {
        key
        for name in _HOOKS
        for key, hook in state.get(name, {}).items()
        if str(getattr(hook, "__module__", "")).startswith("meshard.")
    }
    for name in _HOOKS:
        if name in state:
            hooks = state[name].items()
            state[name] = type(state[name])((key, hook) for key, hook in hooks if key not in ours)
    return state
