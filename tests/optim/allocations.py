"""A log of what torch's allocator gives out and gets back."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Changes of what is allocated, oldest first; filled when the context ends."""

    changes: list[int] = field(default_factory=list)

    @property
    def live(self) -> list[int]:
        """Bytes allocated since the beginning, after each change."""
        total, found = 0, [0]
        for change in self.changes:
            total += change
            found.append(total)
        return found

    @property
    def peak(self) -> int:
        return max(self.live)

    @property
    def left(self) -> int:
        return self.live[-1]


@contextmanager
def recorded(least: int = 1) -> Iterator[Allocations]:
    """Record every allocation of CPU memory inside, of at least so many bytes.

    No garbage is collected meanwhile: what earlier tests have left would be taken for ours.
    """
    found = Allocations()
    gc.collect()
    gc.disable()
    try:
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            yield found
    finally:
        gc.enable()
    for event in profiler.profiler.kineto_results.events():
        is_ours = event.device_type() == torch.autograd.DeviceType.CPU
        if event.name() == "[memory]" and is_ours and abs(event.nbytes()) >= least:
            found.changes.append(event.nbytes())
