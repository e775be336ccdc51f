"""Offloaded units with other features: copies, loading, editing, hooks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CPUOffloadPolicy
from tests.support.cases import CASES
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_threads
from tests.support.threads import run_threads

HOST = CPUOffloadPolicy(pin_memory=False)


def make_both():
    """Return an offloaded and an ordinary model, with a function that trains one step."""
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    models = [case.build(), case.build()]
    for model, policy in zip(models, (HOST, meshard.OffloadPolicy()), strict=True):
        for unit in case.units(model):
            meshard.fully_shard(unit, mesh, offload_policy=policy)

    def backward(model, number=0):
        case.loss(model(case.batch(number, dist.get_rank()))).backward()

    return *models, backward


def copies():
    offloaded, ordinary, backward = make_both()
    backward(offloaded)
    copied = copy.deepcopy(offloaded)
    for model in (offloaded, ordinary, copied):
        model.zero_grad()
        backward(model)
        backward(model, 1)
    assert_same(full_grads(copied), full_grads(ordinary), bitwise=True)
    assert_same(full_grads(offloaded), full_grads(ordinary), bitwise=True)


def test_copies_train_alike():
    run_threads(copies, 2)


@on_threads(2)
def test_shards_are_edited_and_loaded():
    offloaded, ordinary, backward = make_both()
    for model in (offloaded, ordinary):
        with meshard.unsharded_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    assert_same(full_state(offloaded), full_state(ordinary), bitwise=True)
    whole = {name: 3 * value.full_tensor() for name, value in ordinary.state_dict().items()}
    for model in (offloaded, ordinary):
        model.load_state_dict(whole)
        backward(model)
    assert_same(full_state(offloaded), whole, bitwise=True)
    assert_same(full_grads(offloaded), full_grads(ordinary), bitwise=True)


@on_threads(2)
def test_hooks_see_every_gradient_before_it_is_added():
    *models, backward = make_both()
    for model in models:
        for number, param in enumerate(model.parameters()):
            param.register_hook(lambda grad, number=number: grad * (number + 1))
        for number in range(4):
            model.set_is_last_backward(number % 2 == 1)
            backward(model, number)
    assert_same(*(full_grads(model) for model in models), bitwise=True)


@on_threads(2)
def test_a_model_on_meta_is_initialised():
    case, mesh = CASES["transformer"], init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, offload_policy=HOST)
    meshard.materialize(model)
    case.loss(model(case.batch(0, dist.get_rank()))).backward()
    assert all(param.grad.full_tensor().isfinite().all() for param in model.parameters())


@on_threads(2)
def test_a_copy_of_a_model_that_rests_rests_too():
    _, model, backward = make_both()
    meshard.offload(model)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with pytest.raises(RuntimeError, match=r"call meshard\.onload"):
            backward(each)
        with (
            pytest.raises(RuntimeError, match=r"call meshard\.onload"),
            meshard.unsharded_params(each),
        ):
            pass
        meshard.onload(each)
        backward(each)
    assert_same(full_grads(copied), full_grads(model), bitwise=True)
