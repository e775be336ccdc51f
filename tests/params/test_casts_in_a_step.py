"""Parameters that are cast or replaced between a forward and its backward."""

import pytest
import torch
from torch import nn

from meshard import replicate
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks
from tests.support.sharding import shard_blocks

X = torch.arange(12.0).view(2, 6) / 12


def sharded():
    return shard_blocks(seeded(MlpStack()))


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
    loss = model(X).square().mean()
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match="were cast, moved or replaced between its"):
        loss.backward()
    model.float()
    CHANGES[change](plain)
    plain.float()
    for each in (model, plain):
        each.zero_grad()
        each(X).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


@on_fake_ranks(1)
@pytest.mark.parametrize("shard", [sharded, lambda: replicate(seeded(MlpStack()))])
def test_a_cast_that_changes_nothing_may_come_between_forward_and_backward(shard):
    model, plain = shard(), seeded(MlpStack())
    for each in (model, plain):
        loss = each(X).square().mean()
        each.float().cpu().to(torch.float32)
        loss.backward()
    assert_same(full_grads(model), full_grads(plain))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(X).square().mean().backward()
