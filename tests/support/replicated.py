"""Use a ``Pair`` for a replicated model beside a plain one that sees every rank's batch."""

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch, integer_loss
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.strategies import MODES

Run = Callable[[nn.Module, torch.Tensor], None]
SMALL = 2e-4  # MiB: several buckets of an IntegerModel


def run(model: nn.Module, x: torch.Tensor) -> None:
    integer_loss(model(x)).backward()


def bucket_sizes(model: nn.Module) -> dict[str, int]:
    """Return how many elements each bucket of a replicated model has, by its name."""
    rows = [re.split(" {2,}", line) for line in meshard.describe(model).splitlines()]
    return {row[0]: int(row[1].replace(",", "")) for row in rows if row[0].startswith("(root)")}


class Pair:
    """A replicated model and the plain one, which is given what all ranks are given.

    Gradients are integers, sums over all ranks, and must be the same bits.

    Args:
        model: Its copy is kept plain. None: an ``IntegerModel``.
        device: Where both are.
        make: Replicates or shards a model in another way than ``replicate`` does.
        **kwargs: Of ``replicate``.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        device: str = "cpu",
        make: Callable[[nn.Module], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        model = (IntegerModel() if model is None else model).to(device)
        make = make or partial(meshard.replicate, **{"bucket_cap_mb": SMALL, **kwargs})
        self.device = device
        self.plain = copy.deepcopy(model)
        self.ours = make(model)
        self.ours.set_gradient_divide_factor(1.0)
        self.renew_optimizers()

    def renew_optimizers(self) -> None:
        """Build both optimizers again: parameters are others now."""
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) for model in self.both
        ]

    @property
    def both(self) -> tuple[Any, nn.Module]:
        return self.ours, self.plain

    def backward(self, number: int = 0, ours: Run = run, plain: Run = run) -> None:
        """Run both once, and compare nothing."""
        ours(self.ours, integer_batch(number, dist.get_rank()).to(self.device))
        for rank in range(dist.get_world_size()):
            plain(self.plain, integer_batch(number, rank).to(self.device))

    def window(self, schedule: str, number: int = 0) -> None:
        """Run both once in the mode of each letter (N, R or F), and compare nothing."""
        for place, letter in enumerate(schedule):
            self.ours.set_gradient_sync(MODES[letter])
            self.backward(10 * number + place)

    def compare(self) -> None:
        """Compare gradients, values and strides."""
        assert_same(full_grads(self.ours), full_grads(self.plain), bitwise=True)
        for name, param in self.ours.named_parameters():
            if param.grad is not None:
                assert param.grad.dtype == param.dtype, name
                assert param.grad.stride() == param.stride(), name

    def update(self) -> None:
        """Step both, compare parameters, and clear gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        assert_same(full_state(self.ours), full_state(self.plain), bitwise=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for model in self.both:
            model.zero_grad(set_to_none=set_to_none)

    def step(self, number: int, ours: Run = run, plain: Run = run) -> None:
        self.backward(number, ours, plain)
        self.compare()
        self.update()

    def steps(self, numbers: Iterable[int], ours: Run = run, plain: Run = run) -> None:
        for number in numbers:
            self.step(number, ours, plain)

    def assert_views(self) -> None:
        """Gradients take memory once per bucket."""
        grads = [param.grad for param in self.ours.parameters() if param.grad is not None]
        storages = {grad.untyped_storage().data_ptr() for grad in grads if grad.numel()}
        assert len(storages) <= sum(size > 0 for size in bucket_sizes(self.ours).values())
