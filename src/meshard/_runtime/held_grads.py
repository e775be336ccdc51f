"""What are the gradients of a unit, or of some of its parameters, in one flat tensor?"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshard._comm.gradient_buffer import GradientLayout


class Held(NamedTuple):
    """Gradients of some parameters in one flat tensor."""

    layout: GradientLayout
    flat: torch.Tensor  # [shard_numel], or [shard_count, shard_numel] before any reduction
    used: frozenset[int]  # the parameters that have a gradient

    def shards(self, shard_rank: int) -> list[tuple[int, torch.Tensor]]:
        """Return each parameter's shard: a view of ``flat``, which has been reduced."""
        return self.layout.shards(self.flat, shard_rank, self.used)

    def laid_out(self, layout: GradientLayout) -> torch.Tensor:
        """Return ``flat`` in another layout, in which nothing is missing."""
        if self.layout is layout:
            return self.flat
        return self.layout.move(self.flat, layout, self.used)

    def erase(self, indices: frozenset[int]) -> None:
        """Make the slots of some parameters as if they had no gradient, in place."""
        for index in self.used & indices:
            slot = self.layout.slots[index]
            self.flat.narrow(-1, slot.offset, slot.numel).fill_(-0.0)

    def unless_all(self, erased: frozenset[int]) -> Held | None:
        """Return what is left once ``erased`` are gone; None if that is all, used here or not."""
        if erased.issuperset(self.layout.indices):
            return None
        return self._replace(used=self.used - erased)
