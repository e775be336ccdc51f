"""Debug lines of the logger ``meshard``: what happens to a unit, and on which rank."""

from __future__ import annotations

import logging

import torch.distributed as dist

_logger = logging.getLogger("meshard")


def log_event(event: str, unit: str) -> None:
    """Log that ``event`` happens to ``unit`` at this moment. Off, it costs one check of a level."""
    if _logger.isEnabledFor(logging.DEBUG):
        rank = dist.get_rank() if dist.is_initialized() else -1  # -1: the group was destroyed
        _logger.debug("rank %d: %s %s", rank, event, unit)
