"""How does a user have units stepped while backward goes on?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._runtime.plain_tensors import PlainTensors
from meshard._runtime.unit import Unit, units_in
from meshard.flat_optimizer import Params
from meshard.flat_stepper import POINTWISE
from meshard.gradient_clips import check_limit, unit_clip
from meshard.joined_steps import MakeOptimizer
from meshard.overlap_checks import check_not_overlapped, check_rest
from meshard.overlapped_optimizer import OverlappedOptimizer


def overlap_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[[Iterable[Any]], Optimizer],
    param_groups: Params | None = None,
    *,
    max_unit_norm: float | None = None,
    clip_value: float | None = None,
    clip: str | None = None,
    max_norm: float | None = None,
    min_step_bytes: int = 2**20,
    **optimizer_kwargs: Any,
) -> OverlappedOptimizer:
    """Have each unit of ``module`` stepped in backward, and its gradients freed at once.

    A unit is stepped when the gradient of its whole window is reduced: in the last backward
    (``GradientSync.FULL``, and the last one by ``set_is_last_backward``), once, while the backward
    of other units goes on. ``.grad`` is None afterwards. The training loop stays as it is: ``step``
    and ``zero_grad`` of what is returned find nothing left to do, and only check. The numbers are
    those of the ordinary optimizer, bit for bit.

    Args:
        module: With units in it. Call this after the last ``fully_shard``, between two steps.
        optimizer: A class, or what makes an optimizer from param groups. torch's pointwise ones
            (``SGD``, ``Adam``, ``AdamW``, ``Adagrad``, ``Adadelta``, ``Adamax``, ``RMSprop``,
            ``NAdam``, ``RAdam``) step flat shards, any other one the parameters of a unit.
        param_groups: As for that optimizer; None: all trainable parameters of ``module``.
        max_unit_norm: Clip the gradients of each unit by their own norm.
        clip_value: Clamp every element of the gradients to ``[-clip_value, clip_value]``.
        clip: ``"deferred"`` clips by the norm of all gradients together, ``max_norm``. Gradients
            are then kept, out of ``.grad``, and each unit is stepped in the next forward, just
            before it is gathered (or when someone reads it). The norm is ``total_norm`` of what is
            returned.
        max_norm: What that norm is at most.
        min_step_bytes: One call of an optimizer takes the host as long as some twenty tensors in
            it. So small units wait, at the latest until the end of the backward, and are stepped
            together when their gradients have so many bytes on a rank. 0: each by itself, at once.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        A ``torch.optim.Optimizer`` with the ``param_groups`` and the ``state_dict`` of the ordinary
        one, in both directions. The units keep it, so it steps until its ``detach``.

    Raises:
        RuntimeError: A forward or backward is under way.
        TypeError: ``optimizer`` makes no ``Optimizer``, or one that must be given a closure.
        ValueError: There is no unit in ``module``, a parameter is in none or stepped in backward by
            another optimizer already, ``differentiable=True``, a limit is not positive, ``clip``
            and ``max_norm`` do not come together, or ``clip`` is for a replicated module.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.overlap_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()  # steps
    >>> layer.weight.grad is None
    True
    >>> optimizer.step()  # checks
    >>> optimizer.zero_grad()
    """
    units = list(units_in(module))
    if not units:
        raise ValueError(
            f"there is no unit in this {type(module).__name__}; apply fully_shard or replicate "
            "first."
        )
    check_rest(units, "overlap_optimizer")
    change = unit_clip(max_unit_norm, clip_value)
    _check_deferred(clip, max_norm)
    if clip is not None and any(_is_replicated(unit) for unit in units):
        raise ValueError(
            'clip="deferred" steps a parameter when it is read next, which nobody hears of where '
            "replicate keeps it an ordinary tensor; clip each bucket (max_unit_norm), or step as "
            "usual after meshard.clip_grad_norm_."
        )
    if param_groups is None:
        param_groups = [param for param in module.parameters() if param.requires_grad]
    make = functools.partial(cast("MakeOptimizer", optimizer), **optimizer_kwargs)
    template = make(cast("list[dict[str, Any]]", param_groups))
    _check(template)
    check_not_overlapped(param for group in template.param_groups for param in group["params"])
    if type(template) in POINTWISE:
        make = functools.partial(type(template))
    return OverlappedOptimizer(template, make, units, change, max_norm, min_step_bytes)


def _is_replicated(unit: Unit) -> bool:
    return unit.group is not None and isinstance(unit.group.tensors, PlainTensors)


def _check_deferred(clip: str | None, max_norm: float | None) -> None:
    check_limit("max_norm", max_norm)
    if clip not in (None, "deferred"):
        raise ValueError(f'clip must be "deferred" or None, got {clip!r}.')
    if (clip is None) is not (max_norm is None):
        raise ValueError(
            f'clip="deferred" and max_norm go together, got clip={clip!r} and max_norm={max_norm}; '
            "to clip each unit by its own norm, pass max_unit_norm."
        )


def _check(template: object) -> None:
    if not isinstance(template, Optimizer):
        raise TypeError(
            f"optimizer must be a class of optimizers, or make one; got a "
            f"{type(template).__name__}."
        )
    if isinstance(template, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS computes the loss several times per step, so it cannot step in backward; build "
            "it on module.parameters() as usual."
        )
    if any(group.get("differentiable") for group in template.param_groups):
        raise ValueError("overlap_optimizer has no differentiable step.")
