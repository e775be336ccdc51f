"""What is a tensor to a unit, or what was it?

Tensors outlive their part: an optimizer may hold the parameters that ``fully_shard`` replaced, and
would never train. So each says on itself what it is. The checks
are in ``optimizer_steps`` and, for ties that a call would cut, in ``build_unit``.
"""

from __future__ import annotations

import enum

import torch


class Mark(enum.Enum):
    """What a tensor is to the unit that marked it."""

    ORIGINAL = enum.auto()  # what fully_shard replaced
    SHARD = enum.auto()  # the sharded parameter, or a copy of it
    REPLACED_LATER = enum.auto()  # it was the sharded parameter, or should have become it
    WHOLE_FACE = enum.auto()  # the whole parameter, which lives inside forward and backward


def mark_as(tensor: torch.Tensor, mark: Mark, fqn: str) -> None:
    """Write on ``tensor`` what it is, and its dotted name from the unit's module."""
    # By name: torch.save takes attributes along, and may be read where there is no meshard.
    tensor._meshard_mark = (mark.name, fqn)  # type: ignore[attr-defined]


def mark_of(tensor: torch.Tensor) -> tuple[Mark | None, str]:
    """Return what ``mark_as`` wrote; None for a tensor that no unit knows."""
    name, fqn = getattr(tensor, "_meshard_mark", (None, ""))
    return None if name is None else Mark[name], fqn
