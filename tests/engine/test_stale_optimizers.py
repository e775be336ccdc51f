"""Optimizers that would never train the model, which say so at their first step."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_fake_ranks, on_ranks

X = torch.ones(2, 6)


def shard(model, lib=meshard):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.blocks, model):
        lib.fully_shard(unit, mesh=mesh)
    return model


def step(model, optimizer):
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_the_peer_says_nothing_of_an_optimizer_built_before():
    model = MlpStack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = full_state(shard(seeded(model), torch_fsdp))
    step(model, optimizer)
    assert_same(full_state(model), before, bitwise=True, what="the peer has changed")


@on_fake_ranks(2)
def test_an_optimizer_built_before_fully_shard_is_told_so():
    model = MlpStack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shard(seeded(model))
    text = (
        r"AdamW would never train the model: it holds parameter 'MlpStack\.scale' as it "
        r"was before fully_shard.* build the optimizer after the last call of fully_shard"
    )
    with pytest.raises(RuntimeError, match=text):
        step(model, optimizer)


@on_fake_ranks(2)
def test_one_parameter_of_before_among_others_is_found():
    model = seeded(MlpStack())
    early = model.blocks[1].up.bias
    shard(model)
    optimizer = torch.optim.SGD([*list(model.parameters())[:3], early], lr=0.1)
    named = r"SGD would never train .* 'MlpBlock\.up\.bias' as it was before"
    with pytest.raises(RuntimeError, match=named):
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


class BuildsInside(MlpStack):
    def forward(self, x):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return super().forward(x)


@on_fake_ranks(2)
def test_an_optimizer_of_whole_copies_is_told_so():
    model = shard(BuildsInside())
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"'scale' as the unsharded copy .* outside of forward"):
        model.optimizer.step()
    model.blocks[0].unshard()
    optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    model.blocks[0].reshard()
    with pytest.raises(RuntimeError, match=r"'up.weight' as the unsharded copy .* after reshard"):
        step(model, optimizer)


REPLACED = {
    "assigned": lambda model: setattr(
        model.blocks[0].up, "weight", nn.Parameter(torch.ones(10, 6))
    ),
    "loaded": lambda model: model.load_state_dict(MlpStack().state_dict(), assign=True),
}


@pytest.mark.parametrize("how", REPLACED)
@on_fake_ranks(2)
def test_an_optimizer_of_parameters_that_were_replaced_is_told_so(how):
    model = shard(seeded(MlpStack()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    REPLACED[how](model)
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
    model = shard(seeded(MlpStack()))
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
    model = shard(copy.deepcopy(plain))
    step(plain, optimizer)
    copied = copy.deepcopy(model)
    step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))


@on_ranks(2)
def test_an_optimizer_built_after_an_evaluation_trains():
    """The evaluation may leave the root whole."""
    model, plain = shard(seeded(MlpStack())), seeded(MlpStack())
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(X)
    for each in (model, plain):
        step(each, torch.optim.SGD(each.parameters(), lr=0.1))
    assert_same(full_state(model), full_state(plain))
