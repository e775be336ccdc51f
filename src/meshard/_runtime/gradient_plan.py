"""Which parameters take part in a reduction, and in which dtypes are gradients sent and added?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshard._comm.gradient_buffer import GradientLayout
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.sharded_grads import Held

_MAX_LAYOUTS = 64


class GradientPlan:
    """What is decided before each reduction of one group.

    Args:
        group: Whose gradients.
        reduce_dtype: dtype on the wire; None: the widest dtype of the whole gradients.
        accumulate_dtype: dtype of the accumulators; None: the wider of float32 and the parameters'.
    """

    def __init__(
        self,
        group: ParamGroup,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self._group = group
        self.reduce_dtype = reduce_dtype
        self.chosen_dtype = accumulate_dtype
        self._layouts: dict[tuple[int, ...], GradientLayout] = {}

    def layout_for(
        self, gradients: Sequence[torch.Tensor | None], accumulated: Iterable[Held | None]
    ) -> GradientLayout:
        """Return the layout of all that may have a gradient, on this rank or on another.

        Args:
            gradients: What has arrived on this rank.
            accumulated: What is held from earlier backwards of the window.
        """
        held: set[int] = set()
        for each in accumulated:
            if each is not None:
                held.update(each.layout.indices)
        indices = tuple(
            index
            for index, param in enumerate(self._group.params)
            if param.sharded.requires_grad
            or param.unsharded.requires_grad  # when it was last shown: frozen since, on all ranks
            or index in held
            or gradients[index] is not None
        )
        if indices not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:  # a user who freezes at random
                self._layouts.clear()
            layouts = [param.layout for param in self._group.params]
            self._layouts[indices] = GradientLayout(layouts, indices, self._group.place.device)
        return self._layouts[indices]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up."""
        if self.chosen_dtype is not None:
            return self.chosen_dtype
        # Of the parameters as they are now: Module.double may have been called since.
        widest = torch.float32
        for segment in self._group.tensors.layout.segments:
            if segment.dtype.is_floating_point:
                widest = torch.promote_types(widest, segment.dtype)
        return widest

    def wire_dtype(self, layout: GradientLayout) -> torch.dtype:
        """Return the dtype in which the gradients of ``layout`` are sent."""
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        tensors = self._group.tensors
        if tensors.is_one_dtype:
            return tensors.compute_dtypes[0]
        dtypes = [tensors.compute_dtypes[index] for index in layout.indices]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest
