"""Use a case for what must hold for models of many kinds: it has batches, units and a loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tests.support import models
from tests.support.against_plain import inputs_of
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with all that a training loop needs. Pass it between processes by its name."""

    build: Callable[[], nn.Module]  # the same parameters every time
    batch: Callable[[int, int], torch.Tensor]  # (step, rank) to inputs
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda output: (output + 0.5).square().mean()
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


def _case(model: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32) -> Case:
    """Return the case of a model whose inputs are normal, or else token ids."""

    def batch(step: int, rank: int) -> torch.Tensor:
        if shape:
            return inputs_of(rank, step, shape)
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        return torch.randint(0, 11, (2, 5), generator=generator)

    return Case(build=lambda: models.seeded(model()), batch=batch, dtype=dtype)


def _two(block: Callable[[int], nn.Module], dim: int, inlet: nn.Module | None = None) -> nn.Module:
    return models.Blocks(inlet or nn.Identity(), block(dim), block(dim))


CASES = {
    "mlp_stack": _case(models.MlpStack, 3, 6),
    "transformer": _case(models.Transformer),
    "transformer_tied": _case(lambda: models.Transformer(tied=True)),
    "uneven": _case(models.UnevenMlp, 3, 7),
    # units of frozen and trainable parameters, and one that is all frozen
    "frozen_beside": _case(
        lambda: _two(models.Adapted, 6, nn.Linear(6, 6).requires_grad_(False)), 3, 6
    ),
    "mixed_dtype": _case(lambda: _two(models.MixedDtypeBlock, 6), 3, 6, dtype=torch.bfloat16),
    "tied_inside": _case(lambda: _two(models.TiedBlock, 5), 3, 5),
    "sometimes_unused": _case(lambda: _two(models.Experts, 4, nn.Linear(4, 4)), 3, 4),
    "integer": Case(build=IntegerModel, batch=integer_batch, loss=integer_loss, loss_is_sum=True),
}
