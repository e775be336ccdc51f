"""Has an optimizer stepped since?

torch's foreach kernels on DTensors raise no version counter, so the versions of the shards alone
do not tell that a whole copy is stale.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_num_steps = 0
_is_watching = False


def _count_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    global _num_steps
    _num_steps += 1


def watch_optimizer_steps() -> None:
    """Count the steps of every ``torch.optim.Optimizer`` in this process from now on."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_post_hook(_count_step)
        _is_watching = True


def num_optimizer_steps() -> int:
    """Return how many steps any optimizer has taken."""
    return _num_steps
