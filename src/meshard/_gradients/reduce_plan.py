"""How the gradients of a unit are reduced, decided once per reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.buffers import ReusableBuffer
from meshard._comm.communicator import CommStream, Rows
from meshard._comm.cpu import wider
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._engine.param_group import ParamGroup
from meshard._gradients.host_grads import HostGrads
from meshard._gradients.replicated_grads import ReplicatedGrads
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._mesh.layout import FlatLayout

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
        self, used: frozenset[int], accumulated: Iterable[FlatGradients | None]
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
            self._layouts[indices] = GradientLayout(layouts, indices, self._group.spec.device)
        return self._layouts[indices]

    def _indices(
        self, used: frozenset[int], accumulated: Iterable[FlatGradients | None]
    ) -> tuple[int, ...]:
        flat_grads: set[int] = set(used)
        for each in accumulated:
            if each is not None:
                flat_grads.update(each.layout.indices)
        return tuple(
            index
            for index, param in enumerate(self._group.params)
            if param.sharded.requires_grad
            or param.unsharded.requires_grad  # when it was last shown: frozen since, on all ranks
            or index in flat_grads
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


class WireMemory(NamedTuple):
    """Memory for one reduction."""

    buffer: Rows | None  # uninitialised; None: the gradients lie somewhere already
    output: torch.Tensor | None = None  # where the sum should be; None: anywhere
    sums_apart: bool = False  # see Communicator.sums_apart
    reusable: ReusableBuffer | None = None  # of which ``buffer`` is


def memory_for(
    layout: GradientLayout,
    wire: torch.dtype,
    total: torch.dtype,
    *,
    group: ParamGroup,
    grads: ShardedGrads | HostGrads,
    options: ReduceOptions,
    is_idle: bool,
    is_pending: bool,
    is_laid_out: bool,
) -> WireMemory:
    """Return where gradients and their sum should lie.

    Args:
        layout: Of the gradients.
        wire: The dtype in which they are sent.
        total: The dtype in which they are added up.
        group: Whose gradients.
        grads: What shows the sums.
        options: Of the reduction.
        is_idle: No reduction of this group is on its way.
        is_pending: Something is accumulated beside ``.grad``.
        is_laid_out: And so the gradients lie somewhere already.
    """
    mesh_info, comm = group.spec.mesh_info, group.comm
    as_one = bool(options.arrived or options.before)  # hooks are given one tensor
    if isinstance(grads, ReplicatedGrads):
        bucket = grads.free_bucket(layout, wire) if is_idle and not is_pending else None
        across = mesh_info.replicate_group if options.over_replicas else None
        may_sum_apart = not is_laid_out and not as_one and wire == total and layout.numel
        if may_sum_apart and across is not None and comm.sums_apart(across):
            return _apart(layout, wire, bucket, group, across)
        if bucket is not None:
            return WireMemory(bucket)
    output = None
    is_full = options.over_replicas or mesh_info.replicate_group is None
    if is_full and is_idle and isinstance(grads, ShardedGrads):
        output = grads.free_memory(layout, wider(wire, total))
    if is_laid_out:
        return WireMemory(None, output)
    shard_group = options.shard_group or mesh_info.shard_group
    own = output if output is not None and output.dtype == wire else None
    rows = (
        None if as_one else comm.allocate_rows(layout.shard_numel, wire, group=shard_group, own=own)
    )
    if rows is not None:
        return WireMemory(rows, output)
    # Who hooks in may hold what it is given; and where there is one shard, the sum is what is sent.
    may_keep = comm.may_keep_buffers and layout.shard_count > 1 and not layout.is_large
    if may_keep and is_idle and not as_one:
        reusable = layout.reusable_buffer(wire)
        reusable.take()
        return WireMemory(reusable.rows, output, reusable=reusable)
    flat = comm.allocate(
        layout.numel, CommStream.SCATTER, dtype=wire, device=layout.device, group=shard_group
    )
    return WireMemory(flat.view(layout.shard_count, -1), output)


def _apart(
    layout: GradientLayout,
    wire: torch.dtype,
    bucket: torch.Tensor | None,
    group: ParamGroup,
    across: dist.ProcessGroup,
) -> WireMemory:
    """Return memory to send from, and the bucket, or memory like it, for the sum."""
    unsharded = layout.allocate(wire) if bucket is None else bucket
    sent = group.comm.allocate(
        layout.numel,
        CommStream.ALL_REDUCE,
        dtype=wire,
        device=layout.device,
        group=across,
        is_sent=True,
    )
    return WireMemory([sent], unsharded.view(-1), sums_apart=True)
