"""How do whole tensors, or shards from another mesh, get into the shards of a unit?

``load_state_dict`` copies (or assigns) what it is given into parameters that are DTensors, and
torch refuses to mix the two. So before a module loads, each whole tensor in its state dict is
replaced by this rank's part of it. That takes no communication: every rank was given the whole.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._params.dtensors import is_placed_like, local_of
from meshard._params.sharded_param import ShardedParam
from meshard._runtime.unit import Unit, units_of


def register_load_hooks(unit: Unit) -> None:
    """Have every module that owns a parameter of ``unit`` take whole tensors when it loads."""
    if unit.group is None:
        return
    owned: dict[nn.Module, list[tuple[str, int]]] = {}
    for index, param in enumerate(unit.group.params):
        for module_ref, name in param.owners:
            module = module_ref()
            assert module is not None
            owned.setdefault(module, []).append((name, index))
    for module, names in owned.items():
        module.register_load_state_dict_pre_hook(_LoadHook(unit, names))
    for module_ref in unit.modules:
        module = module_ref()
        assert module is not None
        module.register_load_state_dict_post_hook(_adopt_loaded)


def _adopt_loaded(module: nn.Module, _: Any) -> None:
    """Take over what was assigned, so that parameters are tied again before anybody lists them."""
    for unit in units_of(module):
        group = unit.group
        if group is not None and not group.is_showing_unsharded and not group.is_open:
            group.adopt_edits()


class _LoadHook:
    """Runs before one module loads its own parameters.

    Args:
        unit: Whose parameters they are.
        names: Attribute and place in the unit of each.
    """

    def __init__(self, unit: Unit, names: list[tuple[str, int]]) -> None:
        self._unit = weakref.ref(unit)
        self._names = names

    def __deepcopy__(self, memo: dict[int, Any]) -> _LoadHook:
        """Serve the unit's copy, if the unit is being copied: see ``unit_copy``."""
        copied = object.__new__(_LoadHook)
        copied._unit, copied._names = self._unit, self._names
        unit = self._unit()
        if id(unit) in memo:
            copied._unit = weakref.ref(memo[id(unit)])
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say what to do instead of pickling a module whose parameters are sharded."""
        raise TypeError(
            "a module whose parameters belong to a unit of fully_shard cannot be pickled, nor "
            "copied by copy.copy; save its state_dict(), or use copy.deepcopy on the whole model."
        )

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Replace what does not fit in ``state_dict``, which is torch's copy of the user's."""
        unit = self._unit()
        if unit is None or unit.group is None:
            return
        unit.group.finish_copies()
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        for name, index in self._names:
            given = state_dict.get(prefix + name)
            param = unit.group.params[index]
            if not isinstance(given, torch.Tensor) or given.shape != param.sharded.shape:
                continue  # torch has a message for that
            held = module._parameters.get(name)
            if held is param.sharded:
                state_dict[prefix + name] = _fitting(param, given, is_assigned=is_assigned)
            elif held is param.unsharded:
                state_dict[prefix + name] = _whole(param, given)
                # Also into the shard: the whole copy is given back, and lost.
                with torch.no_grad():
                    local_of(param.sharded).copy_(
                        local_of(_fitting(param, given, is_assigned=False))
                    )


def _fitting(param: ShardedParam, given: torch.Tensor, *, is_assigned: bool) -> torch.Tensor:
    """Return ``given`` as a shard with the mesh and placements of ``param``.

    **Collective:** the mesh of ``given``, if it is a DTensor that is placed in another way.
    """
    if is_placed_like(given, param.sharded):
        return given
    shard = param.shard_of(_whole(param, given))
    # Assigned, a view would keep the whole tensor alive.
    return shard.clone() if is_assigned else shard


def _whole(param: ShardedParam, given: torch.Tensor) -> torch.Tensor:
    if not isinstance(given, DTensor):
        return given
    if given.device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"parameter {param.fqn!r} cannot be loaded from a DTensor on {given.device_mesh}, "
            "because this rank is not part of that mesh; load a whole tensor, or save and load "
            "with torch.distributed.checkpoint."
        )
    whole: torch.Tensor = given.full_tensor()
    return whole.detach()
