"""Uneven batches: ranks with fewer of them train like the others."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support import insides
from tests.support.models import seeded
from tests.support.spread import spread

COUNTS = [3, 0, 5]  # batches of each rank


def net():
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))


def batch_of(rank, number):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train(factor):
    rank = dist.get_rank()
    model = meshard.replicate(seeded(net(), 0), bucket_cap_mb=4e-5, broadcast_buffers=True)
    assert len(model._meshard_buckets.units) > 1
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizer = optimizer_of(model)
    num_none = 0
    own = [batch_of(rank, number) for number in range(COUNTS[rank])]
    for batch in meshard.uneven_batches(model, own):
        if batch is None:
            num_none += 1
        else:
            model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert num_none == max(COUNTS[: dist.get_world_size()]) - COUNTS[rank]
    assert insides.units(model)[0].settings.divide_factor == factor
    return {name: value.clone() for name, value in model.state_dict().items()}


def expected(world, factor):
    """One process: the mean over the ranks that have a batch."""
    model = seeded(net(), 0)
    optimizer = optimizer_of(model)
    for number in range(max(COUNTS[:world])):
        having = [rank for rank in range(world) if number < COUNTS[rank]]
        buffers = [buffer.clone() for buffer in model.buffers()]
        after = []
        for rank in having:
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            loss = model(batch_of(rank, number)).square().sum()
            (loss / (len(having) if factor is None else factor)).backward()
            after.append([buffer.clone() for buffer in model.buffers()])
        # The first rank that has a batch gives its buffers to all.
        for buffer, value in zip(model.buffers(), after[0], strict=True):
            buffer.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    return model


@spread(factor=[None, 7.0], world=[2, 3])
def test_ranks_without_a_batch_step_with_the_others(run_ranks, world, factor):
    states = run_ranks(train, world, factor)
    reference = expected(world, factor)
    for name, value in reference.named_parameters():
        for state in states:
            assert torch.equal(state[name], states[0][name])
            torch.testing.assert_close(state[name], value)
    for name, value in reference.named_buffers():
        for state in states:
            torch.testing.assert_close(state[name], value)


def sharded():
    model = net()
    meshard.fully_shard(model[0])
    meshard.replicate(model)
    meshard.uneven_batches(model, [])


def around_the_replicated_one():
    meshard.uneven_batches(nn.Sequential(meshard.replicate(net())), [])


@pytest.mark.parametrize("fn", [sharded, around_the_replicated_one])
def test_other_modules_are_refused(run_ranks, fn):
    text = "ValueError: uneven_batches needs a module to which .* of one dummy row.*labels of -100"
    with pytest.raises(Exception, match=text):
        run_ranks(fn, 2)
