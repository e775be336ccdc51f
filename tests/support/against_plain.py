"""Use this to check a sharded model against its plain copy, which gets the batches of all ranks.

A step is a function of a model and a rank. It returns the loss on that rank's batch, or calls
backward itself and returns nothing. It may depend on the rank in any way.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state

Step = Callable[[nn.Module, int], torch.Tensor | None]
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def inputs_of(rank: int, number: int = 0, shape: Sequence[int] = (3, 6)) -> torch.Tensor:
    """Return one batch of a rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1_000 * rank + number))


def mean_square(model: nn.Module, rank: int) -> torch.Tensor:
    """Return the loss of most tests."""
    return model(inputs_of(rank)).square().mean()


def sharded_and_plain(
    plain: nn.Module,
    units: Iterable[str] = ("blocks",),
    mesh_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Seed ``plain`` and return a sharded copy, and itself.

    Args:
        plain: The model.
        units: Names of submodules that become units, bottom-up; a list stands for all in it. The
            root becomes the last unit.
        mesh_shape: All ranks, in one dimension, by default.
        **options: For every call of ``fully_shard``.
    """
    model = copy.deepcopy(seeded(plain))
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    for name in units:
        unit = model.get_submodule(name)
        for each in unit if isinstance(unit, nn.ModuleList) else [unit]:
            meshard.fully_shard(each, mesh, **options)
    return meshard.fully_shard(model, mesh, **options), plain


def _run(step: Step, model: nn.Module, rank: int) -> None:
    loss = step(model, rank)
    if loss is not None:
        loss.backward()


def check_gradients(
    model: Any,
    plain: nn.Module,
    step: Step = mean_square,
    *,
    times: int = 2,
    dtype: torch.dtype = torch.float32,
    what: str = "gradient",
) -> CommLedger:
    """Run ``step`` on both, and compare the gradients that it leaves, summed over ``times``.

    Return what the last time sent.
    """
    model.zero_grad()
    plain.zero_grad()
    num_ranks = dist.get_world_size()
    for _ in range(times):
        with CommLedger(model) as ledger:
            _run(step, model, dist.get_rank())
        for rank in range(num_ranks):
            _run(step, plain, rank)
    for param in plain.parameters():
        if param.grad is not None:
            param.grad = param.grad.detach() / num_ranks
    assert_same(full_grads(model), full_grads(plain), dtype, what=what)
    return ledger


def check_training(
    model: Any,
    plain: nn.Module,
    step: Step = mean_square,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
) -> CommLedger:
    """Train both by SGD, and compare gradients and parameters after each step.

    Return what the last step sent.
    """
    optimizers = [SGD(each.parameters()) for each in (model, plain)]
    for number in range(steps):
        ledger = check_gradients(model, plain, step, times=1, dtype=dtype, what=f"step {number}")
        for optimizer in optimizers:
            optimizer.step()
        assert_same(full_state(model), full_state(plain), dtype, what=f"step {number}: parameter")
    return ledger
