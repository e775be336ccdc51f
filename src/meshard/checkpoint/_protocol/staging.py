"""Copies in host memory of what is saved in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Staging:
    """Host memory that is kept from save to save."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @torch.inference_mode(False)  # the next save may be outside of it
    @torch.no_grad()
    def copy(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, which are complete when this returns."""
        fits = len(self._buffers) == len(sources) and all(
            buffer.shape == source.shape and buffer.dtype == source.dtype
            for buffer, source in zip(self._buffers, sources, strict=True)
        )
        if not fits:
            self._buffers = [
                torch.empty(
                    source.shape, dtype=source.dtype, device="cpu", pin_memory=not source.is_cpu
                )
                for source in sources
            ]
        for buffer, source in zip(self._buffers, sources, strict=True):
            buffer.copy_(source, non_blocking=True)
        for device in {source.device for source in sources}:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
        return self._buffers
