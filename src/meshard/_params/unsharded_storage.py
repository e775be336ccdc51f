"""Where do a unit's whole parameters live, and how is that memory given back?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshard._geometry.layout import FlatLayout

_ALIGNMENT = 64  # bytes: a cache line, and what vectorised kernels like best


class UnshardedStorage:
    """One allocation per dtype for all whole parameters of a unit.

    The tensors live as long as the unit. Giving the memory back resizes their storage to zero,
    which keeps every view that autograd has saved valid for the next time it is filled.
    Writes go through views that do not share a version counter with the parameters, so that
    refilling is not taken for an in-place change of a saved tensor.

    Args:
        layout: The unit as it is gathered: its dtypes are the dtypes of the whole parameters.
        device: Where whole parameters live.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(layout.params)
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        for segment in layout.segments:
            step = max(1, _ALIGNMENT // segment.dtype.itemsize)
            offsets, numel = [], 0
            for slot in segment.slots:
                offsets.append(numel)
                numel += -(-layout.params[slot.index].numel // step) * step
            flat = torch.empty(numel, dtype=segment.dtype, device=device)
            for slot, offset in zip(segment.slots, offsets, strict=True):
                param = layout.params[slot.index]
                self.views[slot.index] = flat.narrow(0, offset, param.numel).view(param.shape)
            self._storages.append((flat.untyped_storage(), flat.untyped_storage().nbytes()))
        self._has_memory = True
        self.free()

    def as_parameters(self, requires_grad: Sequence[bool]) -> list[torch.nn.Parameter]:
        """Return one ``nn.Parameter`` per view, each with a version counter of its own."""
        return [
            # `.data`, not `.detach()`: only the former starts a new version counter.
            torch.nn.Parameter(view.data, requires_grad=flag)
            for view, flag in zip(self.views, requires_grad, strict=True)
        ]

    def allocate(self) -> None:
        """Take the memory. The content is undefined until it is filled."""
        if not self._has_memory:
            for storage, num_bytes in self._storages:
                storage.resize_(num_bytes)
            self._has_memory = True

    def free(self) -> None:
        """Give the memory back."""
        if self._has_memory:
            for storage, _ in self._storages:
                # Resize, do not replace: autograd may have saved views of this storage.
                storage.resize_(0)
            self._has_memory = False
