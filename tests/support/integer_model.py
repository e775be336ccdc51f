"""Use the ``IntegerModel`` to compare bit for bit: its sums are the same in whatever order.

Activations are -1, 0 or 1 and gradients of activations are integers of at most 8, so gradients of
parameters are integers. Parameters are multiples of a power of two and so stay under SGD with a
learning rate that is a power of two. All sums are then exact in float32 (and those of gradients in
bfloat16 while they are below 256), and a difference of one bit is an error, not rounding.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

MAX_GRADIENT = 8
LEARNING_RATE = 2.0**-5


class _Ternary(torch.autograd.Function):
    """Nearest of -1, 0 and 1; backward passes integer gradients as if it were the identity."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.round().clamp(-1, 1)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad.round().clamp(-MAX_GRADIENT, MAX_GRADIENT)


def ternary(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest of -1, 0 and 1, with integer gradients as of the identity."""
    return _Ternary.apply(x)


def fill_with_halves(model: nn.Module, seed: int = 0) -> Any:
    """Overwrite every parameter by multiples of one half, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)
    return model


class IntegerBlock(nn.Module):
    """A linear layer between ternary activations."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ternary(self.linear(x))


class IntegerModel(nn.Module):
    """Blocks of uneven sizes and a parameter that the root owns.

    Its loss is ``integer_loss(model(x))``, a sum: train it with a divide factor of 1, or of a
    power of two, and ``torch.optim.SGD(..., lr=LEARNING_RATE)``.
    """

    in_dim = 7

    def __init__(self, seed: int = 0, dims: Sequence[int] = (in_dim, 5, 13, 4)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(IntegerBlock(dim, out) for dim, out in itertools.pairwise(dims))
        self.shift = nn.Parameter(torch.empty(dims[-1]))
        fill_with_halves(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return ternary(x + self.shift)


def integer_loss(output: torch.Tensor) -> torch.Tensor:
    """Return a sum whose gradients are integers of 1 to 3, so that learning never ends."""
    signs = torch.arange(output.shape[-1], device=output.device, dtype=output.dtype) % 2 * 2 - 1
    return (output * (2 * signs + output.detach())).sum()


def integer_batch(step: int, rank: int) -> torch.Tensor:
    """Return the inputs of one rank in one step, integers from -2 to 2."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randint(-2, 3, (4, IntegerModel.in_dim), generator=generator).float()
