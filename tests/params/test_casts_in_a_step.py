"""Parameters that are cast or replaced between a forward and its backward."""

import pytest
import torch
from torch import nn

from meshard import replicate
from tests.support.against_plain import check_gradients, check_training
from tests.support.models import MlpStack, seeded
from tests.support.ranks import on_fake_ranks
from tests.support.sharding import shard_blocks

X = torch.arange(12.0).view(2, 6) / 12


def sharded():
    return shard_blocks(seeded(MlpStack()))


def loss_of(model, rank=0):
    return model(X).square().mean()


def replace(model):
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(10, 6))
    with torch.no_grad():
        model(X)  # which adopts it


CHANGES = {
    "cast": lambda model: model.double(),
    "cast one": lambda model: model.blocks[1].half(),
    "replace": replace,
}


@on_fake_ranks(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_backward_whose_parameters_are_gone_is_refused_and_named(change):
    model, plain = sharded(), seeded(MlpStack())
    loss = loss_of(model)
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match="were cast, moved or replaced between its"):
        loss.backward()
    model.float()
    CHANGES[change](plain)
    plain.float()
    check_gradients(model, plain, loss_of)


@on_fake_ranks(1)
@pytest.mark.parametrize("shard", [sharded, lambda: replicate(seeded(MlpStack()))])
def test_a_cast_that_changes_nothing_may_come_between_forward_and_backward(shard):
    def step(model, rank):
        loss = loss_of(model)
        model.float().cpu().to(torch.float32)
        return loss

    check_training(shard(), seeded(MlpStack()), step)
