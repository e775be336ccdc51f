"""Where do the whole gradients of a unit lie while they are reduced, and where does the sum?"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.communicator import Lane, Rows
from meshard._comm.gradient_buffer import GradientLayout
from meshard._comm.kept_buffer import KeptBuffer
from meshard._comm.sums import wider
from meshard._runtime.gradient_plan import ReduceOptions
from meshard._runtime.host_grads import HostGrads
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.plain_grads import PlainGrads
from meshard._runtime.sharded_grads import ShardedGrads


class WireMemory(NamedTuple):
    """Memory for one reduction."""

    buffer: Rows | None  # uninitialised; None: the gradients lie somewhere already
    output: torch.Tensor | None = None  # where the sum should be; None: anywhere
    sums_apart: bool = False  # see Communicator.sums_apart
    kept: KeptBuffer | None = None  # of which ``buffer`` is


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
    roles, comm = group.place.roles, group.comm
    as_one = bool(options.arrived or options.before)  # hooks are given one tensor
    if isinstance(grads, PlainGrads):
        bucket = grads.free_bucket(layout, wire) if is_idle and not is_pending else None
        across = roles.replicate_group if options.over_replicas else None
        may_sum_apart = not is_laid_out and not as_one and wire == total and layout.numel
        if may_sum_apart and across is not None and comm.sums_apart(across):
            return _apart(layout, wire, bucket, group, across)
        if bucket is not None:
            return WireMemory(bucket)
    output = None
    is_full = options.over_replicas or roles.replicate_group is None
    if is_full and is_idle and isinstance(grads, ShardedGrads):
        output = grads.free_memory(layout, wider(wire, total))
    if is_laid_out:
        return WireMemory(None, output)
    shard_group = options.shard_group or roles.shard_group
    own = output if output is not None and output.dtype == wire else None
    rows = None if as_one else comm.lend_rows(layout.shard_numel, wire, group=shard_group, own=own)
    if rows is not None:
        return WireMemory(rows, output)
    # Who hooks in may hold what it is given; and where there is one shard, the sum is what is sent.
    may_keep = comm.may_keep_buffers and layout.shard_count > 1 and not layout.is_large
    if may_keep and is_idle and not as_one:
        kept = layout.kept_buffer(wire)
        kept.take()
        return WireMemory(kept.rows, output, kept=kept)
    flat = comm.allocate(
        layout.numel, Lane.SCATTER, dtype=wire, device=layout.device, group=shard_group
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
    whole = layout.allocate(wire) if bucket is None else bucket
    sent = group.comm.allocate(
        layout.numel, Lane.ALL_REDUCE, dtype=wire, device=layout.device, group=across, is_sent=True
    )
    return WireMemory([sent], whole.view(-1), sums_apart=True)
