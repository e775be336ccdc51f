"""Where does a unit's flat shard live: on its device, or in host memory?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshard._geometry.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class Home:
    """A kind of memory.

    Args:
        device: The device of the mesh, or the CPU; may be meta.
        is_pinned: Page-locked host memory, which a device copies from and to by itself.
        step_device: Where ``overlap_optimizer`` steps what lives here; None: here.
    """

    device: torch.device
    is_pinned: bool = False
    step_device: torch.device | None = None

    @classmethod
    def host_of(cls, device: torch.device, *, pin: bool) -> Home:
        """Return the host memory beside ``device``; pinned only if a device can make use of it."""
        return cls(torch.device("cpu"), pin and device.type != "cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.is_pinned)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor of the same shape, strides and dtype."""
        return torch.empty_like(tensor, device=self.device, pin_memory=self.is_pinned)

    def buffer_for(self, layout: FlatLayout) -> torch.Tensor:
        """Return an uninitialised flat shard of a unit."""
        return layout.allocate(device=self.device, pin_memory=self.is_pinned)


META = Home(torch.device("meta"))
