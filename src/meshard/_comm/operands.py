"""Scalar operands of the kernels of a reduction."""

from __future__ import annotations

import torch

_MAX_OPERANDS = 64
_EXACT = (torch.float32, torch.float64)  # kernels of narrower dtypes use the number as float32


class ScalarOperands:
    """Numbers as 0-d tensors, made once per model.

    torch makes a float64 tensor of a Python number at every call and casts it, which takes longer
    than multiplying a thousand elements. A 0-d CPU tensor of the dtype of the other operand is used
    as it is, with the same result.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def as_operand(self, number: float, other: torch.Tensor) -> float | torch.Tensor:
        """Return what to pass to an operator with ``other`` instead of ``number``."""
        dtype = other.dtype
        if not other.is_cpu or dtype not in _EXACT:
            return number
        key = (number, dtype)
        if key not in self._made:
            if len(self._made) >= _MAX_OPERANDS:  # a divide factor that changes with every batch
                self._made.clear()
            self._made[key] = torch.full((), number, dtype=dtype, device=other.device)
        return self._made[key]
