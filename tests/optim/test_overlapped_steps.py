"""Optimizers in backward against the ordinary ones after it, bit for bit."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync, MixedPrecisionPolicy, overlap_optimizer
from tests.optim.test_flat_optimizer import MANY, assert_same_state, plain_state
from tests.support.covering import covering
from tests.support.models import seeded
from tests.support.parity import assert_same, own_state

WINDOWS = 5
SYNC = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}
SCHEDULES = ("F", "RF", "NRF", "FFF")  # of FFF, only the last F is the last backward
DTYPES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


class Block(nn.Module):
    """An uneven block, with a parameter smaller than the number of ranks."""

    def __init__(self, dim=7, hidden=5):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.tiny = nn.Parameter(torch.empty(1))
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)) * self.tiny)


class Net(nn.Module):
    """A plain block, a checkpointed one, one used twice, tied, frozen and unused weights."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(7, 7, bias=False)
        self.last.weight = self.first.weight
        self.blocks[1].frozen = nn.Parameter(torch.empty(3))
        self.blocks[1].frozen.requires_grad_(False)
        self.blocks[2].unused = nn.Parameter(torch.empty(4))

    def forward(self, x, rest=None):
        plain, recomputed, twice, sometimes = self.blocks
        x = plain(self.first(x))
        x = checkpoint(recomputed, x, use_reentrant=self.use_reentrant)
        x = twice(torch.tanh(twice(x)))
        x = x if rest else sometimes(x)
        return self.last(x)


def make(shape, policy=DTYPES["float32"], model=None, **kwargs):
    mesh = init_device_mesh("cpu", shape)
    model = seeded(Net() if model is None else model)
    for block in model.blocks:
        meshard.fully_shard(block, mesh, mp_policy=policy, **kwargs)
    return meshard.fully_shard(model, mesh, mp_policy=policy, **kwargs)


def batch(number):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, 7, generator=generator)


def window(model, number, schedule="F", *, rest=None, is_last=None):
    """Run one window; every microbatch is the last one unless the schedule has several F."""
    for place, letter in enumerate(schedule):
        is_final = place == len(schedule) - 1
        model.set_is_last_backward(is_final or (letter != "F" if is_last is None else is_last))
        model.set_gradient_sync(SYNC[letter])
        model(batch(10 * number + place), rest).float().square().sum().backward()


def grads(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def train_both(make_model, cls, options, windows=range(WINDOWS), *, schedule="F", **kwargs):
    """Train one model with each of the two; return both with their optimizers."""
    ours, theirs = make_model(), make_model()
    trainable = [param for param in theirs.parameters() if param.requires_grad]
    overlapped, plain = overlap_optimizer(ours, cls, **options), cls(trainable, **options)
    for number in windows:
        for model, optimizer in ((ours, overlapped), (theirs, plain)):
            window(model, number, schedule, **kwargs)
            if optimizer is overlapped:
                assert grads(model) == []
            optimizer.step()
            optimizer.zero_grad()
    assert_same(own_state(ours), own_state(theirs), bitwise=True)
    assert_same_state(plain_state(overlapped), plain_state(plain))
    return (ours, overlapped), (theirs, plain)


def compare(shape, name, dtype, schedule):
    cls, options = MANY[name]
    train_both(lambda: make(shape, DTYPES[dtype]), cls, options, schedule=schedule)


@pytest.mark.default_rows(4)
@covering("shape, name, dtype, schedule", product([(2,), (2, 2)], MANY, DTYPES, SCHEDULES))
def test_as_the_ordinary_one(run_ranks, shape, name, dtype, schedule):
    run_ranks(compare, torch.Size(shape).numel(), shape, name, dtype, schedule)
