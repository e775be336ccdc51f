"""Ranges for torch.profiler: what meshard does, and for which unit. Without one they cost nothing.

``meshard::all_gather layers.0`` is around the call that issues a collective, and
``meshard::wait all_gather layers.0`` where compute waits for it. ``timeline.py`` reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshard._torch.private import is_profiling

_NOTHING = contextlib.nullcontext()


def ranged(*words: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that torch.profiler, if it records this thread, shows as a range."""
    # record_function takes microseconds even without a profiler, so it is called only with one.
    if not is_profiling():
        return _NOTHING
    return torch.profiler.record_function(f"meshard::{' '.join(words)}")


def mark(*words: str) -> None:
    """Let torch.profiler record a moment: what compute does from now on, until the next mark."""
    if is_profiling():
        with ranged(*words):
            pass


@contextlib.contextmanager
def ranged_in(group: dist.ProcessGroup, *words: str) -> Iterator[None]:
    """Record the block like ``ranged``, with the ranks of ``group`` if that has not all of them."""
    with ranged(*words):
        if group.size() < dist.get_world_size():
            mark("ranks", ",".join(map(str, dist.get_process_group_ranks(group))))
        yield
