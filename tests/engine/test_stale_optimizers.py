"""Optimizers that would never train the model, which say so at their first step."""

import copy

import pytest
import torch
from torch import nn

import meshard
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.sharding import shard_blocks

X = torch.ones(2, 6)


def step(model, optimizer):
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_fake_ranks(2)
def test_an_optimizer_built_before_fully_shard_is_told_so():
    model = seeded(MlpStack())
    optimizer = torch.optim.AdamW([model.blocks[1].up.bias], lr=0.1)
    shard_blocks(model)
    optimizer.param_groups[0]["params"] += list(model.parameters())[:3]
    text = (
        r"AdamW would never train the model: it holds parameter 'MlpBlock\.up\.bias' as it "
        r"was before fully_shard.* build the optimizer after the last call of fully_shard"
    )
    with pytest.raises(RuntimeError, match=text):
        step(model, optimizer)
    optimizer.param_groups[0]["params"] = list(model.parameters())  # as accelerate does
    step(model, optimizer)


@on_fake_ranks(2)
def test_an_optimizer_built_between_two_calls_of_fully_shard_is_told_so():
    model = seeded(MlpStack())
    for block in model.blocks:
        meshard.fully_shard(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0](X).sum().backward()
    optimizer.step()  # nothing is wrong yet
    meshard.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'MlpStack\.scale' as it was before fully_shard"):
        step(model, optimizer)


@on_fake_ranks(2)
def test_an_optimizer_of_whole_copies_is_told_so():
    model, built = shard_blocks(MlpStack()), []
    hook = model.blocks[0].register_forward_hook(
        lambda *_: built.append(torch.optim.SGD(model.parameters(), lr=0.1))
    )
    model(X).sum().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"'scale' as the unsharded copy .* outside of forward"):
        built[0].step()
    model.blocks[0].unshard()
    optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    model.blocks[0].reshard()
    with pytest.raises(RuntimeError, match=r"'up.weight' as the unsharded copy .* after reshard"):
        step(model, optimizer)


@pytest.mark.parametrize("how", ["assigned", "loaded"])
@on_fake_ranks(2)
def test_an_optimizer_of_parameters_that_were_replaced_is_told_so(how):
    model = shard_blocks(seeded(MlpStack()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    if how == "loaded":
        model.load_state_dict(MlpStack().state_dict(), assign=True)
    else:
        model.blocks[0].up.weight = nn.Parameter(torch.ones(10, 6))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"as it was before it was replaced .* afterwards"):
        optimizer.step()
    if how == "loaded":
        early.step()  # it got the new ones
    else:
        with pytest.raises(RuntimeError, match=r"'up.weight' as it was before it was replaced"):
            early.step()  # a whole parameter, whose shard the model has made since
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("convert", ["double", "to_empty"])
@on_fake_ranks(2)
def test_an_optimizer_of_parameters_that_were_converted_goes_on(convert):
    model = shard_blocks(seeded(MlpStack()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double() if convert == "double" else model.to_empty(device="cpu")
    for each in model.parameters():
        each.data.zero_()
    model(X.to(model.scale.dtype)).sum().backward()
    optimizer.step()


@on_fake_ranks(2)
def test_optimizers_of_other_models_are_left_alone():
    plain = seeded(MlpStack())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = shard_blocks(copy.deepcopy(plain))
    step(plain, optimizer)
    copied = copy.deepcopy(model)
    step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))


@on_ranks(2)
def test_an_optimizer_built_after_an_evaluation_trains():
    """The evaluation may leave the root whole."""
    model, plain = shard_blocks(seeded(MlpStack())), seeded(MlpStack())
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(X)
    for each in (model, plain):
        step(each, torch.optim.SGD(each.parameters(), lr=0.1))
    assert_same(full_state(model), full_state(plain))
