"""Penalties on weights that are added to the loss."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("place", ["on shards", "on whole parameters"])
def test_a_penalty_on_weights(place):
    plain = seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    model = copy.deepcopy(plain)
    for unit in (model[0], model[2], model):
        meshard.fully_shard(unit)
    xs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    mine = xs[dist.get_rank()]
    for _ in range(3):
        if place == "on shards":
            penalty = model[2].weight.square().sum().full_tensor()
            (model(mine).square().mean() + 0.1 * penalty).backward()
        else:
            with meshard.unsharded_params(model):
                penalty = model[2].weight.square().sum()
                (model(mine).square().mean() + 0.1 * penalty).backward()
        for x in xs:
            ((plain(x).square().mean() + 0.1 * plain[2].weight.square().sum()) / 2).backward()
        assert_same(full_grads(model), full_grads(plain))
        model.zero_grad()
        plain.zero_grad()


class WithLoss(nn.Sequential):
    """Returns the loss, as models of transformers do."""

    def forward(self, x):
        return super().forward(x).square().mean()


@on_ranks(2)
def test_a_penalty_that_is_a_dtensor_is_explained():
    model = seeded(WithLoss(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    for unit in (model[0], model[2], model):
        meshard.fully_shard(unit)
    penalty = sum(param.square().sum() for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"output of unit '\(root\)', an .*full_tensor\(\)"):
        (model(torch.ones(4, 6)) + 0.1 * penalty).backward()
