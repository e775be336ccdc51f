"""The user's settings for the reduction of a unit's gradients."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshard.foreach_reduce import is_divide_factor
from meshard.policies import GradientSync

TensorHook = Callable[[torch.Tensor], None]
DivideFactor = float | torch.Tensor | Callable[[], "float | torch.Tensor"]


def check_divide_factor(factor: object) -> float:
    """Return a divide factor as a float. To read a 0-d tensor, the host waits for its device."""
    if isinstance(factor, torch.Tensor) and factor.dim() == 0:
        factor = factor.item()
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(
            f"factor must be a number, a callable or a 0-d tensor, got {type(factor).__name__}."
        )
    value = float(factor)
    if not is_divide_factor(value):
        raise ValueError(f"factor must be positive and finite, got {factor} (in float32).")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class ReduceHook:
    """One registration of a hook on gradients: ``meshard.register_reduce_hook``."""

    arrived: TensorHook | None = None  # sees the unsharded gradients of each backward
    before: TensorHook | None = None  # sees their sum over microbatches, before it is reduced
    after: TensorHook | None = None  # sees the shard that is about to be added to .grad
    wire_dtype: torch.dtype | None = None  # None: as the policy says
    is_all_reduce: bool = False  # set_all_reduce_hook made it, and its next call replaces it


@dataclass(slots=True)
class ReduceSettings:
    """The settings that the reductions of a unit read. The user may change them between steps."""

    sync: GradientSync = GradientSync.FULL
    divide_factor: DivideFactor | None = None  # None: the number of ranks
    zero_unused: bool = False  # give parameters that no rank used a .grad of zeros, not None
    # How many units may have unsharded gradients in flight; None: 1 on a device, 3 on CPU.
    max_input_buffers: int | None = None
    scatter_group: dist.ProcessGroup | None = None  # for reduce-scatters; None: the shard group
    reduce_hooks: list[ReduceHook] = field(default_factory=list)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are sent, if a hook sets one; None: that of the policy."""
        return next((hook.wire_dtype for hook in self.reduce_hooks if hook.wire_dtype), None)
