"""Small models with their batches, units and losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tests.support import models
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with all that a training loop needs. Pass it between processes by its name."""

    name: str
    build: Callable[[], nn.Module]  # the same parameters every time
    batch: Callable[[int, int], torch.Tensor]  # (step, rank) to inputs
    loss: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype = torch.float32  # the coarsest that it computes in
    loss_is_sum: bool = False  # then ranks add up to the whole batch, else they average

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to shard, bottom-up; the last is the root."""
        return [*getattr(model, "blocks", getattr(model, "layers", [])), model]

    def whole_batch(self, step: int, num_ranks: int) -> torch.Tensor:
        """Return what all ranks together get in ``step``."""
        return torch.cat([self.batch(step, rank) for rank in range(num_ranks)])

    def whole_batches(self, num_steps: int, num_ranks: int) -> list[torch.Tensor]:
        return [self.whole_batch(step, num_ranks) for step in range(num_steps)]

    def batches(self, num_steps: int, rank: int) -> list[torch.Tensor]:
        return [self.batch(step, rank) for step in range(num_steps)]


def _normal(*shape: int) -> Callable[[int, int], torch.Tensor]:
    def batch(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        return torch.randn(shape, generator=generator)

    return batch


def _tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randint(0, 11, (2, 5), generator=generator)


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return (output + 0.5).square().mean()


def _case(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int, int], torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> Case:
    def build() -> nn.Module:
        return models.seeded(model())

    return Case(name=name, build=build, batch=batch, loss=_mean_square, dtype=dtype)


_ALL: Sequence[Case] = [
    _case("mlp_stack", models.MlpStack, _normal(3, 6)),
    _case("transformer", models.Transformer, _tokens),
    _case("transformer_tied", lambda: models.Transformer(tied=True), _tokens),
    _case("uneven", models.UnevenMlp, _normal(3, 7)),
    _case("frozen_beside", models.FrozenBeside, _normal(3, 6)),
    _case("mixed_dtype", models.MixedDtype, _normal(3, 6), torch.bfloat16),
    _case("tied_inside", models.TiedInside, _normal(3, 5)),
    _case("sometimes_unused", models.SometimesUnused, _normal(3, 4)),
    Case(
        name="integer",
        build=IntegerModel,
        batch=lambda step, rank: integer_batch(step, rank),
        loss=integer_loss,
        loss_is_sum=True,
    ),
]
CASES = {case.name: case for case in _ALL}
