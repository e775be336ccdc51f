"""Parameters that were frozen when an optimizer was made, and have gradients later."""

import warnings

import pytest
import torch

import meshard
from tests.support.models import MlpStack, seeded
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

X = torch.ones(2, 6)
MAKE = {
    "local": lambda model: meshard.local_optimizer(model, torch.optim.AdamW, lr=0.1),
    "overlapped": lambda model: meshard.overlap_optimizer(model, torch.optim.AdamW, lr=0.1),
}


def owned(model):
    return meshard.owner_optimizer(
        model, torch.optim.Muon, lr=0.1, select=lambda _, param: param.dim() == 2
    )


def sharded():
    """Return a model with one frozen block."""
    model = shard_blocks(seeded(MlpStack()))
    model.blocks[1].requires_grad_(False)
    return model


def step(model, optimizer):
    """Return the texts of the warnings of a step."""
    model(X).square().sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    optimizer.zero_grad()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", [*MAKE, "owned"])
@on_ranks(2)
def test_an_optimizer_that_was_made_before_parameters_were_frozen_steps_them(name):
    model = sharded()
    model.blocks[1].requires_grad_(True)
    optimizer = (MAKE | {"owned": owned})[name](model)
    for is_trained in (False, True):
        model.blocks[1].requires_grad_(is_trained)
        before = model.blocks[1].up.weight.to_local().clone()
        assert step(model, optimizer) == []
        assert torch.equal(before, model.blocks[1].up.weight.to_local()) is not is_trained


@pytest.mark.parametrize("make", [meshard.local_optimizer, meshard.overlap_optimizer])
@on_ranks(2)
def test_thawed_parameters_may_be_added_or_left_out_on_purpose(make):
    model = sharded()
    optimizer = make(model, torch.optim.AdamW, lr=0.1)
    model.blocks[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
    assert step(model, optimizer) == []
    model = sharded()
    optimizer = make(model, torch.optim.AdamW, model.blocks[0].parameters(), lr=0.1)
    model.blocks[1].requires_grad_(True)
    assert step(model, optimizer) == []
