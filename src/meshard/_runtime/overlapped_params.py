"""Which parameters does an optimizer step in backward, so that others must keep off?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch


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


def is_any_attached() -> bool:
    """Whether any optimizer steps in backward."""
    return bool(_alive)


def find_overlapped(params: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first of ``params`` that some optimizer steps in backward."""
    if not _alive:
        return None
    optimizers = tuple(_alive)
    for param in params:
        if any(optimizer.steps_in_backward(param) for optimizer in optimizers):
            return param
    return None
