"""Where do the whole gradients of a unit lie while they are reduced?"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshard._comm.communicator import Communicator, Lane, Rows
from meshard._comm.gradient_buffer import GradientLayout


def buffer_for(
    layout: GradientLayout,
    dtype: torch.dtype,
    *,
    comm: Communicator,
    group: dist.ProcessGroup,
    bucket: torch.Tensor | None,
    own: torch.Tensor | None,
    as_one: bool,
) -> Rows:
    """Return ``[shard_count, shard_numel]``, uninitialised, or as many rows.

    Args:
        layout: Of the gradients.
        dtype: In which they are sent.
        comm: What they are sent by.
        group: The shard group.
        bucket: Memory that is there already.
        own: Where the sum of this rank's row will be, if that is known. Of rows that are of the
            same dtype it is the own one.
        as_one: One tensor, which reduce hooks are given.
    """
    if bucket is not None:
        return bucket
    rows = None if as_one else comm.lend_rows(layout.shard_numel, dtype, group=group)
    if rows is not None:
        if own is not None and own.dtype == dtype:
            rows[group.rank()] = own
        return rows
    flat = comm.allocate(layout.numel, Lane.SCATTER, dtype=dtype, device=layout.device, group=group)
    return flat.view(layout.shard_count, -1)
