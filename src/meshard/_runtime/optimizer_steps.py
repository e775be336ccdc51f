"""Has an optimizer stepped these parameters since?

torch's foreach kernels on DTensors raise no version counter, so the versions of the shards alone
do not tell that a whole copy is stale.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Stepped(Protocol):
    """What wants to know of the steps of its parameters."""

    num_steps: int


# Keyed by id: tensors compare by value, and a weak reference to one would forbid Module.to to swap
# it. An id that is used again costs a needless gather, no more.
_owners: weakref.WeakValueDictionary[int, Stepped] = weakref.WeakValueDictionary()
_stepped_by: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[Stepped]]]]
_stepped_by = weakref.WeakKeyDictionary()
_is_watching = False


def watch_steps(owner: Stepped, params: list[torch.Tensor]) -> None:
    """Have ``owner.num_steps`` grow when any ``torch.optim.Optimizer`` steps one of ``params``."""
    global _is_watching
    for param in params:
        _owners[id(param)] = owner
    _stepped_by.clear()
    if not _is_watching:
        register_optimizer_step_post_hook(_count_step)
        _is_watching = True


def _count_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    known = _stepped_by.get(optimizer)
    if known is None or known[0] != sizes:
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
        owners = {id(owner): owner for i in ids if (owner := _owners.get(i)) is not None}
        known = _stepped_by[optimizer] = (sizes, [weakref.ref(each) for each in owners.values()])
    for ref in known[1]:
        owner = ref()
        if owner is not None:
            owner.num_steps += 1
