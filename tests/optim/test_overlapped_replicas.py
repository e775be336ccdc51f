"""Optimizers in backward over replicated parameters."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.optim.optimizers import (
    DEFERRED,
    Net,
    clipped,
    deferred,
)
from tests.support.models import seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks


def make():
    """A model in many buckets."""
    return meshard.replicate(seeded(Net()), init_device_mesh("cpu", (2,)), bucket_cap_mb=0.0002)


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_clipping_by_all_gradients(wait):
    """Plain tensors are read without a gather that could wait, so ``step`` steps them."""
    ours, theirs = make(), make()
    late = meshard.overlap_optimizer(ours, torch.optim.SGD, lr=0.1, wait=wait, **DEFERRED)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    assert deferred(ours, late, range(3)) == clipped(theirs, plain, range(3))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


class Shuffled(torch.nn.Module):
    """Used in another order than listed, in which the parameters fit into fewer buckets."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((n,), 0.1) for n in (10, 10, 15, 15))

    def forward(self, x):
        for index in (0, 2, 1, 3):
            x = torch.tanh(x * self.weights[index].sum())
        return x


@on_ranks(2)
def test_detached_before_the_buckets_are_rebuilt():
    models = [meshard.replicate(Shuffled(), bucket_cap_mb=100 / 2**20) for _ in range(2)]
    overlapped = meshard.overlap_optimizer(models[0], torch.optim.SGD, lr=0.1)
    overlapped.detach()
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for model, optimizer in zip(models, (overlapped, plain), strict=True):
        counts = []
        for _ in range(3):
            model(torch.ones(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            units = model._meshard_buckets.units
            counts.append(sum(bool(unit.params) for unit in units))
        assert counts == [3, 2, 2]
    assert_same(full_state(models[0]), full_state(models[1]), bitwise=True)
