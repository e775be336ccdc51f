"""Tensor subclasses with a custom all-gather: training."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import meshard
from meshard import GradientSync
from tests.support.extensions import (
    Bfloat16Whole,
    Int8ForThePeer,
    Int8OnWire,
    RoundingModel,
    with_matrices_as,
)
from tests.support.integer_model import IntegerBlock, IntegerModel, integer_batch, integer_loss
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.threads import run_threads

NAMES = ("replicate", "shard")
STEPS = 5
LEARNING_RATE = 2.0**-9  # so that weights have more bits than travel
N, R, F = GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def build(kind):
    return with_matrices_as(IntegerModel(), kind)


def shard(model, shape, fully_shard=meshard.fully_shard, **kwargs):
    mesh = mesh_of(shape)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **kwargs)
    return model


def train(model, schedule, batch_of):
    """Return loss, gradients and parameters of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    records = []
    for step in range(STEPS):
        loss = 0.0
        for number, sync in enumerate(schedule):
            if sync is not None:
                model.set_gradient_sync(sync)
            part = integer_loss(model(batch_of(10 * step + number)))
            part.backward()
            loss += part.item()
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        records.append((loss, grads, full_state(model)))
    return records


def train_sharded(kind, shape, schedule, **kwargs):
    model = shard(build(kind), shape, **kwargs)
    model.set_gradient_divide_factor(1.0)
    records = train(model, schedule, lambda step: integer_batch(step, dist.get_rank()))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert type(model.blocks[0].linear.weight.to_local()) is kind
    return records


def train_plain(kind, num_ranks, schedule):
    model = RoundingModel(IntegerModel(), kind)

    def batch_of(step):
        return torch.cat([integer_batch(step, rank) for rank in range(num_ranks)])

    records = train(model, [None] * len(schedule), batch_of)

    def renamed(values):
        return {name.removeprefix("model."): value for name, value in values.items()}

    return [(loss, renamed(grads), renamed(params)) for loss, grads, params in records]


@pytest.mark.parametrize(
    ("kind", "shape", "schedule", "reshard"),
    [
        (Int8OnWire, (2,), (F,), None),
        (Int8OnWire, (3,), (N, N, F), False),
        (Int8OnWire, (2, 2), (R, F), True),
        (Int8OnWire, (4,), (N, F), 2),
        (Bfloat16Whole, (2,), (R, F), None),
        (Bfloat16Whole, (3,), (F,), True),
        (Bfloat16Whole, (2, 2), (N, N, F), False),
        (Bfloat16Whole, (4,), (N, F), 2),
    ],
)
def test_training_is_that_of_one_process(kind, shape, schedule, reshard):
    num_ranks = torch.Size(shape).numel()
    expected = train_plain(kind, num_ranks, schedule)
    last = expected[-1][2]["blocks.0.linear.weight"]
    assert not torch.equal(kind.rounded(last), last), "rounding does nothing to these weights"
    runs = run_threads(
        train_sharded, num_ranks, kind, shape, schedule, reshard_after_forward=reshard
    )
    for step, (loss, grads, params) in enumerate(expected):
        assert sum(run[step][0] for run in runs) == loss
        for rank, run in enumerate(runs):
            what = f"step {step}, rank {rank}"
            assert_same(run[step][1], grads, bitwise=True, what=f"{what}: grads")
            assert_same(run[step][2], params, bitwise=True, what=f"{what}: params")


class EvenModel(nn.Module):
    """Blocks whose rows two ranks divide."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([IntegerBlock(IntegerModel.in_dim, 4), IntegerBlock(4, 6)])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train_both(make, kind, shape, reshard_after_forward):
    """Return what torch's fully_shard and ours give on the same ranks."""
    runs = []
    for fully_shard in (torch_fully_shard, meshard.fully_shard):
        model = shard(
            with_matrices_as(make(), kind),
            shape,
            fully_shard,
            reshard_after_forward=reshard_after_forward,
        )
        batches = functools.partial(integer_batch, rank=dist.get_rank())
        runs.append(train(model, [None], batches))
    return runs


# Of uneven shards torch asks that all which is gathered has the padded shape of the shard, so a
# scale per row is not possible there.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "shape", "reshard_after_forward"),
    [
        (EvenModel, Int8ForThePeer, (2,), False),
        (EvenModel, Int8ForThePeer, (2, 2), True),
        (IntegerModel, Bfloat16Whole, (2,), True),
        (IntegerModel, Bfloat16Whole, (3,), True),
        (IntegerModel, Bfloat16Whole, (2, 2), False),
    ],
)
def test_the_peer_gives_the_same(run_ranks, make, kind, shape, reshard_after_forward):
    num_ranks = torch.Size(shape).numel()
    is_exact = num_ranks != 3  # what is divided by three is rounded
    for theirs, ours in run_ranks(train_both, num_ranks, make, kind, shape, reshard_after_forward):
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            for place, what in enumerate(("loss", "grads", "params")):
                what = f"step {step}: {what}"
                assert_same(one[place], other[place], bitwise=is_exact, what=what)
