"""Which parameters does an optimizer step in backward, so that others must keep off?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from meshard._params.private_torch import queue_backward_callback


class Overlapping(Protocol):
    """An optimizer that steps in backward."""

    def steps_in_backward(self, param: torch.Tensor) -> bool:
        """Whether it steps this very parameter."""


_alive: weakref.WeakSet[Overlapping] = weakref.WeakSet()


def note_attached(optimizer: Overlapping) -> None:
    """Note that an optimizer steps in backward from now on."""
    _alive.add(optimizer)


def note_detached(optimizer: Overlapping) -> None:
    """Note that it does not any more."""
    _alive.discard(optimizer)


def find_overlapped(params: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first of ``params`` that some optimizer steps in backward."""
    if not _alive:
        return None
    optimizers = tuple(_alive)
    for param in params:
        if any(optimizer.steps_in_backward(param) for optimizer in optimizers):
            return param
    return None


class _ScaledBackward:
    """Queued on a backward of a scaled loss, and dropped by autograd when that is over."""

    num_alive = 0

    def __init__(self) -> None:
        _ScaledBackward.num_alive += 1

    def __call__(self) -> None:
        """Do nothing at the end: what other callbacks do then belongs to this backward, too."""

    def __del__(self) -> None:
        _ScaledBackward.num_alive -= 1


def note_scaled(losses: Iterable[torch.Tensor]) -> None:
    """Note that the backward of these is that of a loss that was multiplied by a scale."""
    for loss in losses if _alive else ():
        if loss.requires_grad:
            loss.register_hook(_begin_scaled)


def _begin_scaled(gradient: torch.Tensor) -> None:
    queue_backward_callback(_ScaledBackward())


def is_scaled() -> bool:
    """Whether a backward of a scaled loss is under way."""
    return _ScaledBackward.num_alive > 0
