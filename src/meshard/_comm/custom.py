"""Collectives and memory that the user brings.

The communicator announces, orders and waits for them as for its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshard._torch.private import backend_of
from meshard.policies import AllGather, ReduceScatter


@dataclass(frozen=True, slots=True)
class CommSettings:
    """What replaces the collectives of one unit, or the memory for them."""

    all_gather: AllGather | None = None  # allocates its output
    reduce_scatter: ReduceScatter | None = None  # allocates its input and output
    from_group: bool = False  # allocate with the process group, which may then send without a copy

    def __bool__(self) -> bool:
        return self != CommSettings()


def memory_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of ``group``, which allocates memory on ``device``.

    Raises:
        RuntimeError: The backend has no memory to give.
    """
    # There is no public name for what NCCL allocates for zero-copy transfers.
    backend = backend_of(group, device)
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(
            f"the backend {backend.name()!r} cannot allocate memory on {device}; "
            "leave set_allocate_memory_from_process_group_for_comm out."
        )
    return backend
