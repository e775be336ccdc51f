"""What is decided before a reduction: who takes part, how it goes, in which dtypes?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.gradient_buffer import GradientLayout
from meshard._geometry.layout import FlatLayout
from meshard._runtime.held_grads import Held
from meshard._runtime.param_group import ParamGroup

_MAX_LAYOUTS = 64

TensorHook = Callable[[torch.Tensor], None]


class ReduceOptions(NamedTuple):
    """How one reduction goes.

    Attributes:
        over_replicas: Also across the replicas.
        divide_factor: What all gradients of the window are divided by; None: the number of ranks.
        zero_unused: Give what no rank has used a gradient of zero.
        shard_group: Another group of the same ranks to reduce over; None: the group that gathers.
        arrived: Hooks for the whole gradients of this backward.
        before: Hooks for what is about to be sent.
        wire_dtype: The dtype to send in; None: as the policy says.
    """

    over_replicas: bool
    divide_factor: float | None = None
    zero_unused: bool = False
    shard_group: dist.ProcessGroup | None = None
    arrived: Sequence[TensorHook] = ()
    before: Sequence[TensorHook] = ()
    wire_dtype: torch.dtype | None = None


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
        self._all = tuple(range(len(group.params)))
        self.everything = frozenset(self._all)
        self._widest_of: FlatLayout | None = None
        self._widest = torch.float32

    def layout_for(
        self, used: frozenset[int], accumulated: Iterable[Held | None]
    ) -> GradientLayout:
        """Return the layout of all that may have a gradient, on this rank or on another.

        Args:
            used: Those for which one has arrived on this rank.
            accumulated: What is held from earlier backwards of the window.
        """
        indices = self._all if used is self.everything else self._indices(used, accumulated)
        if indices not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:  # a user who freezes at random
                self._layouts.clear()
            layouts = [param.layout for param in self._group.params]
            self._layouts[indices] = GradientLayout(layouts, indices, self._group.place.device)
        return self._layouts[indices]

    def _indices(self, used: frozenset[int], accumulated: Iterable[Held | None]) -> tuple[int, ...]:
        held: set[int] = set(used)
        for each in accumulated:
            if each is not None:
                held.update(each.layout.indices)
        return tuple(
            index
            for index, param in enumerate(self._group.params)
            if param.sharded.requires_grad
            or param.unsharded.requires_grad  # when it was last shown: frozen since, on all ranks
            or index in held
        )

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up."""
        if self.chosen_dtype is not None:
            return self.chosen_dtype
        # Of the parameters as they are now: Module.double may have been called since.
        layout = self._group.tensors.layout
        if layout is not self._widest_of:
            self._widest_of, self._widest = layout, torch.float32
            for segment in layout.segments:
                if segment.dtype.is_floating_point:
                    self._widest = torch.promote_types(self._widest, segment.dtype)
        return self._widest

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
