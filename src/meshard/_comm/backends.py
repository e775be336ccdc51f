"""What does a process group know of itself that has no public name in torch?"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what carries the collectives of ``group`` on ``device``."""
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the collectives of ``group`` on CPU tensors wait for a rank."""
    options = getattr(backend_of(group, torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout
