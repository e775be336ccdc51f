"""When may an optimizer step in backward, and what?"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshard._runtime.overlapped_params import find_overlapped, is_scaled
from meshard._runtime.unit import Unit

_NOT_SCALED = (
    "Compute in bfloat16, which needs no loss scaling "
    "(MixedPrecisionPolicy(param_dtype=torch.bfloat16)), pass enabled=False to the scaler, or step "
    "in the ordinary way (detach())."
)


def check_not_scaled(unit: Unit) -> None:
    """Raise if gradients are those of a scaled loss.

    Raises:
        RuntimeError: Naming the unit and the alternatives.
    """
    if is_scaled():
        raise RuntimeError(
            "ShardedGradScaler cannot be used with overlap_optimizer, which steps unit "
            f"{unit.label!r} in backward, before gradients could be unscaled and found to be "
            f"finite. {_NOT_SCALED}"
        )


def refuse_scaler() -> None:
    """Raise: a scaler is about to step what has been stepped in backward.

    Raises:
        RuntimeError: Naming the alternatives.
    """
    raise RuntimeError(
        "torch.amp.GradScaler cannot be used with overlap_optimizer, which has stepped in backward "
        f"already, by gradients that were still scaled. {_NOT_SCALED}"
    )


def no_unit(param: torch.Tensor, number: int) -> str:
    """Return what is wrong with a parameter, of the param group with this number."""
    return (
        f"a parameter of shape {tuple(param.shape)} in param group {number} is in no unit of the "
        "module, so there is no moment in backward at which its gradient is known to be complete; "
        "leave it out of param_groups and step it by an ordinary optimizer of its own, or apply "
        "fully_shard to the module around it."
    )


def check_rest(units: Iterable[Unit], what: str) -> None:
    """Raise unless no unit is in the middle of a step.

    Raises:
        RuntimeError: Naming the unit.
    """
    for unit in units:
        if not unit.lifecycle.is_between_steps():
            raise RuntimeError(
                f"{what} was called inside the forward or backward of unit {unit.label!r}; "
                "call it between steps."
            )


def check_not_overlapped(params: Iterable[torch.Tensor]) -> None:
    """Raise if another optimizer steps one of ``params`` in backward.

    Raises:
        ValueError: Likewise.
    """
    param = find_overlapped(params)
    if param is not None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is stepped in backward by another "
            "optimizer already; call its detach() first (OverlappedOptimizer.attached_to(module) "
            "finds it), or give each its own parameters."
        )
