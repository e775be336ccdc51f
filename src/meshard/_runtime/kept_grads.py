"""How do sharded gradients stay where they are from step to step?

Their memory, and the DTensors over it, are made once. What a reduction yields is written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshard._comm.gradient_buffer import GradientLayout
from meshard._params.dtensors import wrap_like
from meshard._params.sharded_param import ShardedParam


class KeptGrads:
    """The gradients of one unit's shards, whether they are in use or not.

    Args:
        params: Of the unit.
        layout: Of their gradients.
        dtype: Of the sums.
    """

    def __init__(
        self, params: Sequence[ShardedParam], layout: GradientLayout, dtype: torch.dtype
    ) -> None:
        self.flat = torch.empty(layout.shard_numel, dtype=dtype, device=layout.device)
        self._layout = layout
        self._params = params
        rank, everything = params[0].shard_rank, frozenset(layout.indices)
        locals_ = layout.shards(self.flat, rank, everything)
        # A gradient of a narrower parameter is a copy, and made anew in each step.
        self._is_whole = all(params[index].sharded.dtype == dtype for index, _ in locals_)
        self._made_for = [params[index].sharded for index, _ in locals_]
        self.faces = {index: wrap_like(params[index].sharded, local) for index, local in locals_}
        self._addresses = {index: local.data_ptr() for index, local in locals_}

    def fits(self, layout: GradientLayout, dtype: torch.dtype) -> bool:
        """Whether this is for gradients in that layout and dtype, of the parameters of today."""
        made_for, params = self._made_for, self._params
        return (
            self._layout is layout
            and self.flat.dtype == dtype
            and all(params[i].sharded is p for i, p in zip(self.faces, made_for, strict=True))
        )

    def show(self, used: frozenset[int]) -> dict[int, int] | None:
        """Make these the ``.grad`` of the parameters in ``used``.

        Returns:
            Where each ``.grad`` is; None if they cannot be shown.
        """
        if not self._is_whole:
            return None
        params = self._params
        if len(used) == len(self.faces):
            for index, face in self.faces.items():
                params[index].sharded.grad = face
            return self._addresses.copy()
        for index in used:
            params[index].sharded.grad = self.faces[index]
        return {index: self._addresses[index] for index in used}
