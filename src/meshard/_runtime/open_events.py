"""What happens at the moments of a step to a unit that is open?

Its modules run as they are, like plain ones: nothing is gathered or given back. Gradients of whole
parameters join those that the unit gets in the ordinary way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshard._runtime.group_tensors import GradientHook
from meshard._runtime.schedule import ForwardCall, ForwardPass
from meshard._runtime.unit import StepEvents, Unit


@dataclass(frozen=True, slots=True)
class Opening:
    """How units are opened: the arguments of ``meshard.unsharded_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False

    def check_allows(self, inner: Opening, label: str) -> None:
        """Raise unless what ``inner`` asks for is so while ``self`` is in force."""
        if (inner.rank0_only, inner.offload_to_cpu) != (self.rank0_only, self.offload_to_cpu):
            raise RuntimeError(
                f"unit {label!r} is open already, with other arguments ({self}); "
                "use the same rank0_only and offload_to_cpu, or leave the outer context first."
            )
        if inner.writeback and not self.writeback:
            raise RuntimeError(
                f"unit {label!r} is open already, and by writeback=False its edits will be "
                "dropped; pass writeback=False here too, or writeback=True to the outer context."
            )


class OpenEvents:
    """Stands in for the lifecycle of a unit while it is open: all that differs is here.

    Args:
        root: The lifecycle of the root, which goes on for other units.
        opening: What was asked for.
        is_whole_here: Whether this rank has the whole parameters.
    """

    def __init__(self, root: StepEvents, opening: Opening, *, is_whole_here: bool) -> None:
        self.root = root
        self.opening = opening
        self._is_whole_here = is_whole_here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.root, name)

    @property
    def is_last_backward(self) -> bool:
        """Of the root, as it is set."""
        return self.root.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self.root.is_last_backward = value

    def is_running(self, unit: Unit) -> bool:
        """Not as a unit."""
        return False

    def pre_forward(self, unit: Unit) -> None:
        """Let it run, if its parameters are whole here."""
        if not self._is_whole_here:
            raise RuntimeError(
                f"unit {unit.label!r} is open on rank 0 only, so it cannot run on this rank; leave "
                "unsharded_params(..., rank0_only=True) before the forward."
            )

    def post_forward(self, unit: Unit, module_place: int, *, failed: bool) -> ForwardCall | None:
        """Nothing to give back."""
        return None

    def pre_backward(
        self, unit: Unit, of: ForwardPass, call: ForwardCall, gradient: torch.Tensor
    ) -> None:
        """Refuse: what this backward needs has been given back."""
        raise RuntimeError(
            f"a backward reached unit {unit.label!r} inside unsharded_params, from a forward made "
            "before it; run that backward before, or after."
        )


def joining_hook_maker(unit: Unit) -> Callable[[int], GradientHook]:
    """Return what makes the hook that hands the gradient of a whole parameter to its unit."""
    unit_ref = weakref.ref(unit)

    def make(index: int) -> GradientHook:
        return partial(_join, unit_ref, index)

    return make


def _join(unit_ref: weakref.ref[Unit], index: int, whole: torch.Tensor) -> None:
    unit, gradient = unit_ref(), whole.grad
    whole.grad = None
    if unit is None or unit.group is None or gradient is None:
        return
    unit.lifecycle.gradient_joins(unit)  # first: it may clean up after an interrupted step
    face = unit.group.params[index].unsharded
    moved = gradient.to(face.device, face.dtype)
    face.grad = moved if face.grad is None else face.grad + moved
