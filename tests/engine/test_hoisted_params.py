"""Parameters that inner units use and outer units own."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync, fully_shard_units
from tests.support.integer_model import (
    LEARNING_RATE,
    IntegerBlock,
    IntegerModel,
    integer_batch,
    integer_loss,
)
from tests.support.parity import assert_same, assert_same_run, full_grads, train, train_plain
from tests.support.ranks import on_ranks, on_threads
from tests.support.threads import run_threads

SGD = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
STEPS = 4
DIM = IntegerModel.in_dim


class Trunk(nn.Module):
    """Blocks in a list; the first and the last have one weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(IntegerBlock(DIM, DIM) for _ in range(3))
        self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class TiedModel(nn.Module):
    """Two trunks, of which one is run as ``remember`` says, and a head tied to a bias inside."""

    def __init__(self, recompute=None):
        super().__init__()
        self.trunks = nn.ModuleList([Trunk(), Trunk()])
        self.head = IntegerBlock(DIM, DIM)
        self.head.linear.bias = self.trunks[0].blocks[1].linear.bias
        self.recompute = recompute
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)

    def run(self, module, x):
        if self.recompute is None:
            return module(x)
        return checkpoint(module, x, use_reentrant=self.recompute == "reentrant")

    def forward(self, x):
        x = self.run(self.trunks[0], x + 0 * self.head.linear.bias)
        for block in self.trunks[1].blocks:
            x = self.run(block, x)
        return self.head(x)


class CalledTrunks(TiedModel):
    """Calls the trunks as modules, whose blocks are recomputed one by one."""

    def __init__(self, recompute=None):
        super().__init__(recompute)
        for trunk in self.trunks:
            for block in trunk.blocks:
                block.forward = functools.partial(self.run, block.forward)

    def forward(self, x):
        x = x + 0 * self.head.linear.bias  # reentrant checkpoints want an input with a gradient
        for trunk in self.trunks:
            x = trunk(x)
        return self.head(x)


def sharded(mesh_shape, model_class, units, recompute, **kwargs):
    model = model_class(recompute)
    fully_shard_units(model, init_device_mesh("cpu", mesh_shape), units=units, **kwargs)
    model.set_gradient_divide_factor(1.0)
    return model


def check(model_class, mesh_shape, units, recompute, **options):
    """Compare every step with one process, bit for bit."""
    num_ranks = torch.Size(mesh_shape).numel()

    def run():
        model = sharded(mesh_shape, model_class, units, recompute, **options)
        batches = [integer_batch(step, dist.get_rank()) for step in range(STEPS)]
        steps = train(model, batches, SGD, loss_fn=integer_loss, reduce_loss="sum")
        held = model.trunks[0].blocks
        assert held[0].linear.weight is held[2].linear.weight
        return steps

    batches = [
        torch.cat([integer_batch(step, rank) for rank in range(num_ranks)]) for step in range(STEPS)
    ]
    expected = train_plain(model_class(), batches, SGD, loss_fn=integer_loss)
    assert len({step.loss for step in expected}) > 1
    for steps in run_threads(run, num_ranks):
        assert_same_run(steps, expected, bitwise=True)


BOTH = (Trunk, IntegerBlock)


@pytest.mark.parametrize(
    ("units", "mesh_shape", "reshard", "recompute"),
    [
        (BOTH, (2,), None, None),
        (BOTH, (2,), None, "plain"),
        (BOTH, (2,), None, "reentrant"),
        (BOTH, (2, 2), True, "plain"),
        (BOTH, (2, 2), False, "reentrant"),
        (IntegerBlock, (2,), False, None),
        (IntegerBlock, (2,), True, "reentrant"),
        (IntegerBlock, (2, 2), False, "plain"),
    ],
)
def test_gradients_of_hoisted_parameters_agree_bit_for_bit(units, mesh_shape, reshard, recompute):
    check(CalledTrunks, mesh_shape, units, recompute, reshard_after_forward=reshard)


@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
def test_units_that_borrow_may_be_recomputed_from_outside(recompute):
    check(TiedModel, (2,), IntegerBlock, recompute)


@pytest.mark.parametrize("first", list(GradientSync))
@on_threads(4)
def test_hoisted_parameters_take_part_in_every_schedule(first):
    model, oracle = sharded((2, 2), CalledTrunks, BOTH, None), CalledTrunks()
    for number, sync in enumerate([first, GradientSync.FULL]):
        model.set_gradient_sync(sync)
        integer_loss(model(integer_batch(number, dist.get_rank()))).backward()
        for rank in range(4):
            integer_loss(oracle(integer_batch(number, rank))).backward()
    assert_same(full_grads(model), full_grads(oracle), bitwise=True)


@on_threads(2)
def test_hoisting_adds_no_collective():
    model = sharded((2,), CalledTrunks, BOTH, None)
    with meshard.CommLedger(model) as ledger:
        integer_loss(model(integer_batch(0, dist.get_rank()))).backward()
    units = sorted({event.unit for event in ledger.events})
    assert units[0] == "(root)" and "trunks.0" in units and len(units) == 10
    assert ledger.counts == {"all_gather": 19, "reduce_scatter": 10}


@on_ranks(2)
def test_the_peer_refuses_a_tie_across_units_in_the_first_forward():
    model = CalledTrunks()
    for each in (*model.trunks[0].blocks, *model.trunks[1].blocks, *model.trunks, model):
        torch_fsdp.fully_shard(each)
    with pytest.raises(ValueError, match="already managed by another FSDP group"):
        model(integer_batch(0, 0))
