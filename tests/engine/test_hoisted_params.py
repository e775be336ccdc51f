"""Parameters that inner units use and outer units own."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from meshard import GradientSync, fully_shard_units
from tests.support.integer_model import (
    LEARNING_RATE,
    IntegerBlock,
    IntegerModel,
    integer_batch,
    integer_loss,
)
from tests.support.models import Made
from tests.support.parity import assert_same, full_grads, train
from tests.support.ranks import on_threads
from tests.support.spread import slow
from tests.support.threads import run_threads

SGD = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
STEPS = 4
DIM = IntegerModel.in_dim


class Trunk(nn.Sequential):
    """Blocks; the first and the last have one weight."""

    def __init__(self):
        super().__init__(*(IntegerBlock(DIM, DIM) for _ in range(3)))
        self[2].linear.weight = self[0].linear.weight


def tied_model(recompute=None, calls_trunks=True):
    """Return two trunks and a head tied to a bias inside.

    Blocks are recomputed one by one from inside, where the trunks are called as modules; else a
    trunk, and each block of the other one, from outside.
    """

    def run(module, x):
        if recompute is None:
            return module(x)
        return checkpoint(module, x, use_reentrant=recompute == "reentrant")

    def forward(model, x):
        x = x + 0 * model.head.linear.bias  # reentrant checkpoints want an input with a gradient
        if calls_trunks:
            return model.head(model.trunks[1](model.trunks[0](x)))
        for module in (model.trunks[0], *model.trunks[1]):
            x = run(module, x)
        return model.head(x)

    model = Made(forward, trunks=[Trunk(), Trunk()], head=IntegerBlock(DIM, DIM))
    model.head.linear.bias = model.trunks[0][1].linear.bias
    for block in (*model.trunks[0], *model.trunks[1]) if calls_trunks else ():
        block.forward = functools.partial(run, block.forward)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)
    return model


def sharded(mesh_shape, units, *args, **kwargs):
    model = tied_model(*args)
    fully_shard_units(model, init_device_mesh("cpu", mesh_shape), units=units, **kwargs)
    model.set_gradient_divide_factor(1.0)
    return model


BOTH = (Trunk, IntegerBlock)


@pytest.mark.parametrize(
    ("units", "mesh_shape", "reshard", "recompute", "calls_trunks"),
    [
        slow(BOTH, (2,), None, None, True),
        slow(BOTH, (2,), None, "plain", True),
        (BOTH, (2,), None, "reentrant", True),
        (BOTH, (2, 2), True, "plain", True),
        slow(BOTH, (2, 2), False, "reentrant", True),
        (IntegerBlock, (2,), True, "reentrant", True),
        slow(IntegerBlock, (2, 2), False, "plain", True),
        (IntegerBlock, (2,), None, "plain", False),
        (IntegerBlock, (2,), None, "reentrant", False),
    ],
)
def test_gradients_of_hoisted_parameters_agree_bit_for_bit(
    units, mesh_shape, reshard, recompute, calls_trunks
):
    num_ranks = torch.Size(mesh_shape).numel()

    def run():
        model = sharded(mesh_shape, units, recompute, calls_trunks, reshard_after_forward=reshard)
        batches = [integer_batch(step, dist.get_rank()) for step in range(STEPS)]
        steps = train(model, batches, SGD, loss_fn=integer_loss, reduce_loss="sum")
        first, _, last = model.trunks[0]
        assert first.linear.weight is last.linear.weight
        return steps

    batches = [
        torch.cat([integer_batch(step, rank) for rank in range(num_ranks)]) for step in range(STEPS)
    ]
    expected = train(tied_model(), batches, SGD, loss_fn=integer_loss)
    assert len({step["loss"] for step in expected.values()}) > 1
    for steps in run_threads(run, num_ranks):
        assert_same(steps, expected, bitwise=True)


@pytest.mark.parametrize("first", list(GradientSync))
@on_threads(4)
def test_hoisted_parameters_take_part_in_every_schedule(first):
    model, oracle = sharded((2, 2), BOTH), tied_model()
    for number, sync in enumerate([first, GradientSync.FULL]):
        model.set_gradient_sync(sync)
        integer_loss(model(integer_batch(number, dist.get_rank()))).backward()
        for rank in range(4):
            integer_loss(oracle(integer_batch(number, rank))).backward()
    assert_same(full_grads(model), full_grads(oracle), bitwise=True)
