"""Parameters that inner units use and outer units own."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync, fully_shard_units
from tests.support.covering import covering
from tests.support.integer_model import (
    LEARNING_RATE,
    IntegerBlock,
    IntegerModel,
    integer_batch,
    integer_loss,
)
from tests.support.parity import assert_same, assert_same_run, full_grads, train, train_plain
from tests.support.ranks import on_ranks

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


def train_sharded(*args, **kwargs):
    model = sharded(*args, **kwargs)
    batches = [integer_batch(step, dist.get_rank()) for step in range(STEPS)]
    runs = train(model, batches, SGD, loss_fn=integer_loss, reduce_loss="sum")
    held = model.trunks[0].blocks
    assert held[0].linear.weight is held[2].linear.weight
    return runs


def plain(model_class, num_ranks):
    batches = [
        torch.cat([integer_batch(step, rank) for rank in range(num_ranks)]) for step in range(STEPS)
    ]
    return train_plain(model_class(), batches, SGD, loss_fn=integer_loss)


def check(run_ranks, mesh_shape, recompute, units, **kwargs):
    num_ranks = 2 if len(mesh_shape) == 1 else 4
    expected = plain(CalledTrunks, num_ranks)
    assert len({step.loss for step in expected}) > 1
    runs = run_ranks(train_sharded, num_ranks, mesh_shape, CalledTrunks, units, recompute, **kwargs)
    for run in runs:
        assert_same_run(run, expected, bitwise=True)


@pytest.mark.parametrize("recompute", [None, "plain", "reentrant"])
def test_gradients_of_hoisted_parameters_agree_bit_for_bit(run_ranks, recompute):
    check(run_ranks, (2,), recompute, (Trunk, IntegerBlock))


@pytest.mark.default_rows(2)
@covering(
    "units, mesh_shape, reshard_after_forward, recompute",
    itertools.product(
        [(Trunk, IntegerBlock), IntegerBlock],
        [(2,), (2, 2)],
        [True, False],
        [None, "plain", "reentrant"],
    ),
)
def test_they_agree_however_units_are_made_and_freed(
    run_ranks, units, mesh_shape, reshard_after_forward, recompute
):
    check(run_ranks, mesh_shape, recompute, units, reshard_after_forward=reshard_after_forward)


@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
def test_units_that_borrow_may_be_recomputed_from_outside(run_ranks, recompute):
    expected = plain(TiedModel, 2)
    for run in run_ranks(train_sharded, 2, (2,), TiedModel, IntegerBlock, recompute):
        assert_same_run(run, expected, bitwise=True)


def windows(schedule):
    model = sharded((2, 2), CalledTrunks, (Trunk, IntegerBlock), None)
    for number, sync in enumerate(schedule):
        model.set_gradient_sync(sync)
        integer_loss(model(integer_batch(number, dist.get_rank()))).backward()
    return full_grads(model)


@pytest.mark.parametrize("first", list(GradientSync))
def test_hoisted_parameters_take_part_in_every_schedule(run_ranks, first):
    oracle = CalledTrunks()
    for number in range(2):
        for rank in range(4):
            integer_loss(oracle(integer_batch(number, rank))).backward()
    for grads in run_ranks(windows, 4, [first, GradientSync.FULL]):
        assert_same(grads, full_grads(oracle), bitwise=True)


def counts():
    model = sharded((2,), CalledTrunks, (Trunk, IntegerBlock), None)
    with meshard.CommLedger(model) as ledger:
        integer_loss(model(integer_batch(0, dist.get_rank()))).backward()
    return ledger.counts, sorted({event.unit for event in ledger.events})


def test_hoisting_adds_no_collective(run_ranks):
    for found, units in run_ranks(counts, 2):
        num_units = len(units)
        assert units[0] == "(root)" and "trunks.0" in units and num_units == 10
        assert found == {"all_gather": 2 * num_units - 1, "reduce_scatter": num_units}


@on_ranks(2)
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 does not notice them")
def test_the_peer_refuses_a_tie_across_units_in_the_first_forward():
    model = CalledTrunks()
    for each in (*model.trunks[0].blocks, *model.trunks[1].blocks, *model.trunks, model):
        torch_fsdp.fully_shard(each)
    with pytest.raises(ValueError, match="already managed by another FSDP group"):
        model(integer_batch(0, 0))
