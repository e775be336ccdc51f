"""What has a group of parameters accumulated, and how far is it reduced?

Three accumulators per unit, all in the accumulate dtype: ``U`` holds whole gradients that no
collective has seen, ``Q`` what has been reduced over the shard group but not across the replicas,
``A`` is the ``.grad`` of the sharded parameters. With ``g`` the gradients of one backward:

    NONE             U += g
    REDUCE_SCATTER   Q += mean_S(U + g);                   U = 0
    FULL             A += mean_R(Q + mean_S(U + g));       U = 0;  Q = 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from meshard._comm.communicator import Lane
from meshard._comm.foreach_reduce import ReduceRequest, Reduction
from meshard._comm.gradient_buffer import GradientLayout
from meshard._params.dtensors import make_dtensor
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.sharded_grads import Held, ShardedGrads, local_views

TensorHook = Callable[[torch.Tensor], None]


class ReductionInFlight(NamedTuple):
    """A reduction of this group that has been started."""

    reduction: Reduction
    layout: GradientLayout
    is_full: bool  # goes into .grad, not into the partial


class GradientState:
    """The accumulators of one group, and the moves between them.

    Args:
        group: Whose gradients.
        reduce_dtype: dtype on the wire; None: the widest dtype of the whole gradients.
        accumulate_dtype: dtype of the accumulators; None: the wider of float32 and the parameters'.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self._group = group
        self._reduce_dtype = reduce_dtype
        self._chosen_dtype = accumulate_dtype
        self._layouts: dict[tuple[int, ...], GradientLayout] = {}
        self._unreduced: Held | None = None  # U
        self._partial: Held | None = None  # Q
        self._in_flight = 0
        self._dropped: frozenset[int] = frozenset()  # cleared while they were on their way
        self.sharded = ShardedGrads(group)  # A

    @property
    def is_pending(self) -> bool:
        """Whether anything is accumulated that is not in ``.grad`` yet."""
        return self._unreduced is not None or self._partial is not None

    @property
    def pending(self) -> str:
        """What has not been done yet to what is accumulated, in words; empty if nothing is."""
        if self._unreduced is not None:
            return "not reduced yet (GradientSync.NONE)"
        if self._partial is not None:
            return "not reduced across the replicas yet (GradientSync.REDUCE_SCATTER)"
        return "still on their way (set_is_last_backward(False))" if self._in_flight else ""

    def pending_of_params(self) -> dict[int, DTensor | None]:
        """Return the partial of each parameter that has one; None if it is not reduced at all."""
        roles, found = self._group.place.roles, dict[int, DTensor | None]()
        if self._partial is not None:
            for index, local in local_views(self._partial, roles.shard_rank):
                layout = self._group.params[index].layout
                # Only a 2D mesh has partials.
                placements = (Partial("avg"), Shard(layout.shard_dim))
                found[index] = make_dtensor(local, roles.mesh, placements, layout.shape)
        if self._unreduced is not None:
            found.update(dict.fromkeys(self._unreduced.used))
        return found

    def clear(self, indices: frozenset[int] | None = None) -> None:
        """Forget what is accumulated but not in ``.grad``, of all or of some parameters."""
        gone = frozenset(range(len(self._group.params))) if indices is None else indices
        if self._unreduced is not None:
            self._unreduced = self._unreduced.without(gone)
        if self._partial is not None:
            self._partial = self._partial.without(gone)
        if self._in_flight:
            self._dropped |= gone
        self.sharded.release_cleared()

    def clear_window(self) -> None:
        """Forget everything, ``.grad`` included."""
        self.clear()
        self.sharded.clear()

    def abandoned(self) -> None:
        """A reduction on its way was dropped."""
        self._in_flight -= 1
        self._dropped = frozenset()

    def drop_arrived(self) -> None:
        """Forget whole gradients that have arrived but were not taken."""
        for param in self._group.params:
            param.unsharded.grad = None

    def _take(self) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        for param in self._group.params:
            gradient = param.unsharded.grad
            if gradient is not None:
                param.unsharded.grad = None
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            else:
                gradients.append(None)
        return gradients

    def _layout_for(self, gradients: list[torch.Tensor | None]) -> GradientLayout:
        """Return the layout of all that may have a gradient, on this rank or on another."""
        held: set[int] = set()
        for accumulator in (self._unreduced, self._partial):
            if accumulator is not None:
                held.update(accumulator.layout.indices)
        indices = tuple(
            index
            for index, param in enumerate(self._group.params)
            if param.sharded.requires_grad or index in held or gradients[index] is not None
        )
        if indices not in self._layouts:
            layouts = [param.layout for param in self._group.params]
            device = self._group.place.device
            self._layouts[indices] = GradientLayout(layouts, indices, device)
        return self._layouts[indices]

    @property
    def _accumulate_dtype(self) -> torch.dtype:
        if self._chosen_dtype is not None:
            return self._chosen_dtype
        # Of the parameters as they are now: Module.double may have been called since.
        widest = torch.float32
        for segment in self._group.tensors.storage.layout.segments:
            if segment.dtype.is_floating_point:
                widest = torch.promote_types(widest, segment.dtype)
        return widest

    def _wire_dtype(self, layout: GradientLayout) -> torch.dtype:
        if self._reduce_dtype is not None:
            return self._reduce_dtype
        dtypes = [self._group.tensors.compute_dtypes[index] for index in layout.indices]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    @staticmethod
    def _laid_out(held: Held, layout: GradientLayout) -> torch.Tensor:
        if held.layout is layout:
            return held.flat
        return held.layout.move(held.flat, layout, held.used)

    @torch.no_grad()
    def accumulate(self) -> None:
        """``NONE``: add the whole gradients that have arrived to ``U``."""
        gradients = self._take()
        layout = self._layout_for(gradients)
        if not layout.indices:
            return
        used = frozenset(i for i, gradient in enumerate(gradients) if gradient is not None)
        if self._unreduced is None:
            flat = layout.allocate(self._accumulate_dtype)
            layout.pack(flat, gradients)
        else:
            flat = self._laid_out(self._unreduced, layout)
            layout.add(flat, gradients)
            used |= self._unreduced.used
        self._unreduced = Held(layout, flat, used)

    @torch.no_grad()
    def start_reduce(
        self,
        *,
        over_replicas: bool,
        divide_factor: float | None,
        zero_unused: bool = False,
        before: Sequence[TensorHook] = (),
        shard_group: dist.ProcessGroup | None = None,
    ) -> ReductionInFlight | None:
        """``REDUCE_SCATTER`` and ``FULL``: start reducing ``U`` and what has arrived.

        **Collective:** the shard group (or ``shard_group``, another one of the same ranks), then
        the replica group if ``over_replicas``.
        """
        gradients = self._take()
        layout = self._layout_for(gradients)
        if not layout.indices:
            return None
        roles = self._group.place.roles
        buffer, used = self._whole_buffer(layout, gradients)
        if zero_unused:
            used = frozenset(layout.indices)
        for hook in before:
            hook(buffer)
        partial = None if self._partial is None else self._laid_out(self._partial, layout)
        self._unreduced = self._partial = None
        request = ReduceRequest(
            buffer=buffer,
            wire_dtype=self._wire_dtype(layout),
            partial=partial,
            shard_group=shard_group or roles.shard_group,
            replicate_group=roles.replicate_group if over_replicas else None,
            replicate_count=roles.replicate_count,
            divide_factor=divide_factor,
            accumulate_dtype=self._accumulate_dtype,
            marks=layout.marks_for(used),
            label=self._group.label,
        )
        reduction = Reduction(request, self._group.comm)
        self._in_flight += 1
        is_full = over_replicas or roles.replicate_group is None
        return ReductionInFlight(reduction, layout, is_full)

    def _whole_buffer(
        self, layout: GradientLayout, gradients: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor, frozenset[int]]:
        used = frozenset(i for i, gradient in enumerate(gradients) if gradient is not None)
        wire_dtype = self._wire_dtype(layout)
        if self._unreduced is None:
            # float16 is divided before it is narrowed to, or sums would overflow that need not.
            is_narrowing = wire_dtype == torch.float16 and any(
                gradient is not None and gradient.dtype != wire_dtype for gradient in gradients
            )
            if is_narrowing:
                buffer = layout.allocate(self._accumulate_dtype)
            else:
                buffer = self._group.comm.allocate(
                    layout.numel,
                    Lane.SCATTER,
                    dtype=wire_dtype,
                    device=layout.device,
                    group=self._group.place.roles.shard_group,
                ).view(layout.shard_count, -1)
            layout.pack(buffer, gradients)
            return buffer, used
        flat = self._laid_out(self._unreduced, layout)
        layout.add(flat, gradients)
        return flat, used | self._unreduced.used

    @torch.no_grad()
    def finish_reduce(self, in_flight: ReductionInFlight, after: Sequence[TensorHook] = ()) -> None:
        """Put the result of a reduction where it belongs: into ``.grad``, or into ``Q``."""
        reduced = in_flight.reduction.finish()
        self._in_flight -= 1
        result = Held(in_flight.layout, reduced.shard, reduced.used)
        kept = result.without(self._dropped) if self._dropped else result
        self._dropped = frozenset()
        if kept is None:
            return
        if not in_flight.is_full:
            # Also when nobody in this shard group had a gradient: another replica may have had.
            self._partial = kept
        else:
            for hook in after:  # also without a gradient: the hook may communicate
                hook(kept.flat)
            if kept.used:
                self.sharded.add(kept)
