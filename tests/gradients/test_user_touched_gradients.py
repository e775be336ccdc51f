"""Gradients that the user has changed, removed or put aside, in the steps after."""

import weakref

import pytest
import torch
from torch import nn

import meshard
from tests.support.live_memory import settled_tensor_bytes
from tests.support.ranks import on_ranks


def small(out_features=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, out_features), nn.Linear(out_features, 2))
    for layer in model:
        meshard.fully_shard(layer)
    return meshard.fully_shard(model)


BATCH = torch.arange(12.0).reshape(3, 4)


def local(model):
    return model[0].weight.grad.to_local()


def scale_in_graph(model):
    model[0].weight.grad.mul_(torch.ones((), requires_grad=True))


TOUCHES = {
    "numpy": lambda model: local(model).numpy().sum(),
    "other processes": lambda model: local(model).share_memory_().sum(),
    "weak reference": lambda model: weakref.ref(model[0].weight.grad),
    "requires grad": lambda model: model[0].weight.grad.requires_grad_().shape,
    "graph": scale_in_graph,
    "attribute": lambda model: setattr(model[0].weight.grad, "seen", True),
}


@on_ranks(2)
@pytest.mark.parametrize(
    "touch",
    [pytest.param(name, marks=[pytest.mark.extras] * (name == "numpy")) for name in TOUCHES],
)
def test_what_a_user_did_to_a_gradient_goes_with_it(touch):
    model = small()
    expected = None
    for _ in range(4):
        model(BATCH).sum().backward()
        gradient = model[0].weight.grad
        assert not gradient.requires_grad and not hasattr(gradient, "seen")
        expected = local(model).clone() if expected is None else expected
        assert torch.equal(local(model), expected)
        del gradient
        left = TOUCHES[touch](model)
        model.zero_grad()
        if touch == "weak reference":
            assert left() is None


def drop_one(model):
    model[0].weight.grad = None


def replace_all(model):
    for param in model.parameters():
        param.grad = param.grad.clone()


@on_ranks(2)
@pytest.mark.parametrize("take_away", [drop_one, replace_all])
def test_a_gradient_taken_away_within_a_window_keeps_its_value(take_away):
    model = small()
    model(BATCH).sum().backward()
    held, expected = model[0].weight.grad, local(model).clone()
    take_away(model)
    model(BATCH).sum().backward()
    assert torch.equal(held.to_local(), expected)
    times = 1 if take_away is drop_one else 2
    assert torch.equal(local(model), times * expected)


@on_ranks(2)
def test_gradients_follow_a_cast_there_and_back():
    model = small()
    model(BATCH).sum().backward()
    expected = local(model).clone()
    model.double()
    model.float()
    model.zero_grad()
    model(2 * BATCH).sum().backward()
    assert torch.equal(local(model), 2 * expected)


@on_ranks(2)
def test_gradients_of_empty_shards_stay_the_same_in_a_window():
    model = small(out_features=1)  # one rank of two owns nothing of the first layer's parameters
    for _ in range(3):
        model(BATCH).sum().backward()
        grads = [param.grad for param in model.parameters()]
        model(BATCH).sum().backward()
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        del grads
        model.zero_grad()


@on_ranks(2)
def test_gradients_that_are_cleared_in_flight_do_not_come_back_and_keep_no_memory():
    model = small()
    model.set_manual_backward_finalization(True)  # so backwards leave reductions in flight
    for _ in range(2):
        model(BATCH).sum().backward()
        model.finalize_backward()
        model.zero_grad()
    before = settled_tensor_bytes()
    model(BATCH).sum().backward()
    model.zero_grad()
    model.finalize_backward()
    assert [name for name, param in model.named_parameters() if param.grad is not None] == []
    assert settled_tensor_bytes() <= before
