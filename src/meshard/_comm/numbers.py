"""How are small kernels given a number without paying for it at each call?

torch makes a float64 tensor of a Python number at every call and casts it, which takes longer than
to multiply a thousand elements by it. A tensor without dims, of the dtype of the other operand and
in host memory, is used as it is, with the same result.
"""

from __future__ import annotations

import torch

_MOST = 64
_EXACT = (torch.float32, torch.float64)  # narrower ones compute with the number as float32


class Numbers:
    """Numbers as tensors, made once. They live as long as what uses them: the model."""

    def __init__(self) -> None:
        self._made: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def as_operand(self, number: float, other: torch.Tensor) -> float | torch.Tensor:
        """Return what to pass to a kernel beside ``other`` instead of ``number``."""
        dtype = other.dtype
        if not other.is_cpu or dtype not in _EXACT:
            return number
        key = (number, dtype)
        if key not in self._made:
            if len(self._made) >= _MOST:  # a divide factor that changes with every batch
                self._made.clear()
            self._made[key] = torch.full((), number, dtype=dtype, device=other.device)
        return self._made[key]
