"""Names that differ between the supported versions of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

# torch 2.13 renamed the collectives on one tensor; the old names warn there.
if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor

_METHODS_ARE_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")

# Since torch 2.13; an instance of () does not exist.
TorchDataParallelMeshDims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", ())


def start_all_gather_on(
    group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor
) -> dist.Work:
    """Start an all-gather without the checks of arguments that torch's function repeats."""
    if _METHODS_ARE_RENAMED:
        return group.all_gather_single(output, source)
    return group._allgather_base(output, source)


def start_all_to_all_on(
    group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, sizes: list[int]
) -> dist.Work:
    """Start an all-to-all, likewise; ``sizes`` by rank, empty for equal sizes."""
    if _METHODS_ARE_RENAMED:
        return group.all_to_all_single(output, source, sizes, sizes)
    return group.alltoall_base(output, source, sizes, sizes)
