"""Which hooks have users put on sharded parameters, and who runs them?

Autograd never sees a shard, so what ``register_hook`` and ``register_post_accumulate_grad_hook``
have put on one is run from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshard._params.dtensors import wrap_like
from meshard._params.private_torch import unasked
from meshard._params.sharded_param import ShardedParam


def look_at(params: Sequence[ShardedParam]) -> tuple[list[int], bool]:
    """Return which parameters have hooks, and whether none has a gradient."""
    hooked, is_clear = [], True
    with unasked():
        for index, param in enumerate(params):
            sharded = param.sharded
            if sharded.grad is not None:
                is_clear = False
            if sharded._backward_hooks or sharded._post_accumulate_grad_hooks:
                hooked.append(index)
    return hooked, is_clear


def run_tensor_hooks(sharded: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
    """Run what ``register_hook`` has registered, on a copy of what is about to be added.

    Returns:
        What they have made of it, as a DTensor; None if there is no such hook.
    """
    hooks = sharded._backward_hooks
    if not hooks:
        return None
    # A copy: a hook may keep it.
    grad: torch.Tensor = wrap_like(sharded, local.to(sharded.dtype, copy=True))
    for hook in tuple(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def run_post_hooks(sharded: torch.Tensor) -> None:
    """Run what ``register_post_accumulate_grad_hook`` has registered, now that it is added."""
    hooks = sharded._post_accumulate_grad_hooks
    for hook in tuple(hooks.values()) if hooks else ():
        hook(sharded)
