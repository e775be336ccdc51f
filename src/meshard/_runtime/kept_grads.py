"""How are sharded gradients the same tensors in every step?

The DTensors that ``.grad`` shows are made once, over one flat tensor, which takes longer than to
move its memory; what a reduction yields is written there. The memory goes back whenever gradients
are cleared, unless the user wants it to stay. What somebody else holds then, in Python or in a
graph, is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import NamedTuple

import torch

from meshard._comm.gradient_buffer import GradientLayout
from meshard._params.dtensors import locals_of, wrap_like
from meshard._params.private_torch import unasked
from meshard._params.sharded_param import ShardedParam
from meshard._runtime.holders import Holders


class Places(NamedTuple):
    """Where some gradients are: for whoever asks, which few do."""

    start: int
    offsets: Mapping[int, int | None]  # None: it is empty, and nowhere
    used: frozenset[int]

    def addresses(self) -> dict[int, int]:
        """Return them by parameter."""
        return {
            index: 0 if offset is None else self.start + offset
            for index, offset in self.offsets.items()
            if index in self.used
        }


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
        self._made_for = [(params[index], params[index].sharded) for index, _ in locals_]
        self.faces = {index: wrap_like(params[index].sharded, local) for index, local in locals_}
        self._locals = [local for _, local in locals_]
        start = self.flat.data_ptr()
        self._offsets = {
            index: own.data_ptr() - start if own.numel() else None for index, own in locals_
        }
        self._storage = self.flat.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self._has_memory = True
        faces: list[torch.Tensor] = list(self.faces.values())
        self._holders = Holders([self.flat, *faces, *self._locals], faces)

    def begin(self, mark: Callable[[torch.Tensor], None]) -> None:
        """Mark every ``.grad``-to-be. Nobody else has seen these tensors."""
        for face in self.faces.values():
            mark(face)
        del face  # this frame would count
        self._holders.begin()

    def take(self) -> None:
        """Have memory, if it has been given back."""
        if not self._has_memory:
            self._storage.resize_(self._num_bytes)
            self._has_memory = True

    def give_back(self) -> bool:
        """Give the memory back, now that no ``.grad`` is one of these.

        Returns:
            Whether that was possible; else others hold some of these tensors, which are theirs now.
        """
        storage = self._storage
        # Once numpy has seen it, or another process, it cannot be resized.
        if not storage.resizable() or storage.is_shared() or not self._holders.are_alone:
            return False
        storage.resize_(0)
        self._has_memory = False
        return True

    def fits(self, layout: GradientLayout, dtype: torch.dtype) -> bool:
        """Whether this is for gradients in that layout and dtype, of the parameters of today."""
        if self._layout is not layout or self.flat.dtype is not dtype:
            return False
        for param, made_for in self._made_for:
            if param.sharded is not made_for:
                return False
        # A cast of the module puts other memory under the gradients that there are.
        return all(map(is_, locals_of(self.faces.values()), self._locals))

    def show(self, used: frozenset[int]) -> Places | None:
        """Make these the ``.grad`` of the parameters in ``used``.

        Returns:
            Where each ``.grad`` is; None if they cannot be shown.
        """
        if not self._is_whole:
            return None
        params, faces = self._params, self.faces
        with unasked():
            for index in faces if len(used) == len(faces) else used:
                params[index].sharded.grad = faces[index]
        return Places(self.flat.data_ptr(), self._offsets, used)
