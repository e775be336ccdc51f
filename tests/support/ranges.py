"""Use ``profiled_ranges()`` to see the ranges that meshard shows torch.profiler."""

import contextlib
import warnings
from collections.abc import Iterator

import torch

_PREFIX = "meshard::"


@contextlib.contextmanager
def profiled() -> Iterator[torch.profiler.profile]:
    """Record the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")  # as torch 2.11 tells
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            yield profiler


@contextlib.contextmanager
def profiled_ranges() -> Iterator[list[str]]:
    """Give a list, which after the block has the names of the ranges, in order."""
    names: list[str] = []
    with profiled() as profiler:
        yield names
    events = sorted(profiler.events(), key=lambda each: each.time_range.start)
    names += [e.name.removeprefix(_PREFIX) for e in events if e.name.startswith(_PREFIX)]
