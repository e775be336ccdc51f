"""How are the gradients of one unit clipped, before the others have any?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from meshard._params.dtensors import local_of
from meshard.gradients import clip_coefficient, get_total_norm, scale_gradients


def check_limit(name: str, value: float | None) -> None:
    """Raise unless ``value`` is None or may be a limit.

    Raises:
        ValueError: It is not a positive number.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a positive number or None, got {value!r}.")
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}; leave it out not to clip.")


def unit_clip(
    max_unit_norm: float | None, clip_value: float | None
) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """Return what clips the gradients of a unit in place; None: nothing does.

    **Collective:** with ``max_unit_norm``, what is returned must be called by all ranks of the
    meshes of the gradients, as ``get_total_norm``.

    Args:
        max_unit_norm: What their norm is at most afterwards.
        clip_value: What the magnitude of an element is at most; before the norm is taken.

    Raises:
        ValueError: One of them is not a positive number.
    """
    check_limit("max_unit_norm", max_unit_norm)
    check_limit("clip_value", clip_value)
    if max_unit_norm is None and clip_value is None:
        return None

    def clip(grads: Sequence[torch.Tensor]) -> None:
        if clip_value is not None:
            for grad in grads:
                (local_of(grad) if isinstance(grad, DTensor) else grad).clamp_(
                    -clip_value, clip_value
                )
        if max_unit_norm is not None:
            scale_gradients(grads, clip_coefficient(get_total_norm(grads), max_unit_norm))

    return clip
