"""Which parameter group a tensor belongs to, for optimizers and for gradient clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from meshard._torch.patches import hold_pending
from meshard._torch.private import has_backward_optimizer

if TYPE_CHECKING:
    from meshard._engine.param_group import ParamGroup

# Keyed by id: tensors compare by value, and a weak reference to one would forbid Module.to to swap
# it. Another tensor may get the id later, so what is found is checked.
_owners: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_manually_unsharded: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
# Called whenever a group registers parameters.
on_registered: list[Callable[[], None]] = []


def register_owner(owner: ParamGroup) -> None:
    """Record ``owner`` as the group of its sharded parameters, which may be new tensors."""
    for index, param in enumerate(owner.params):
        _owners[id(param.sharded)] = owner
        owner.indices[id(param.sharded)] = index
    for call in on_registered:
        call()


def owner_of(param: torch.Tensor) -> ParamGroup | None:
    """Return the group whose sharded parameter this very tensor is."""
    owner = _owners.get(id(param))
    return None if owner is None or owner.index_of(param) is None else owner


def owners_of(params: Iterable[torch.Tensor]) -> list[ParamGroup]:
    """Return the groups that have one of ``params`` as a sharded parameter, each once."""
    return list(dict.fromkeys(owner for each in params if (owner := owner_of(each)) is not None))


def all_owners() -> set[ParamGroup]:
    """Return all groups that there are."""
    return set(_owners.values())


def has_been_sharded(param: torch.Tensor) -> bool:
    """Whether a group has, or had, a sharded parameter with the id of ``param``."""
    return id(param) in _owners


def register_manually_unsharded(owner: ParamGroup) -> None:
    """Note that ``module.parameters()`` yields unsharded parameters of ``owner`` at present."""
    for param in owner.params:
        _manually_unsharded[id(param.unsharded)] = owner
    hold_pending(owner)  # zero_grad sees the unsharded parameters, and .grad is on the shards


def sharded_params_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``params`` with the sharded parameter in the place of every unsharded one."""
    if not _manually_unsharded:
        return list(params)
    given = list(params)
    owners = {owner for param in given if (owner := _manually_unsharded.get(id(param))) is not None}
    # By what is unsharded now: the id may have been that of another tensor.
    sharded = {id(each.unsharded): each.sharded for owner in owners for each in owner.params}
    return [sharded.get(id(param), param) for param in given]


def refuse_backward_optimizer(
    name: str, param: torch.Tensor, error: Callable[[str], Exception]
) -> None:
    """Raise ``error(text)`` if torch's ``_apply_optimizer_in_backward`` steps ``param``."""
    if has_backward_optimizer(param):
        raise error(
            f"parameter {name} has _in_backward_optimizers: torch's _apply_optimizer_in_backward "
            "steps it before its gradient is reduced, or never. Build the model again without "
            "them, and call meshard.overlap_optimizer(module, SGD, lr=...) after fully_shard or "
            "replicate, which steps in backward too."
        )
