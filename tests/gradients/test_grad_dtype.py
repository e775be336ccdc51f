"""``grad_dtype``, in which torch keeps the gradient of a parameter, on sharded parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from tests.support.ranks import on_threads

PER_RANK = (256.0, 1.0)  # their mean, 128.5, is no bfloat16


def made(**kwargs):
    layer = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    layer.weight.grad_dtype = torch.float32
    return meshard.fully_shard(layer, **kwargs)


def backward(layer):
    layer(torch.full((1, 4), PER_RANK[dist.get_rank()], dtype=torch.bfloat16)).sum().backward()


def assert_gradient(param, value, dtype=torch.float32):
    assert type(param.grad) is DTensor
    assert param.grad.dtype is param.grad.to_local().dtype is dtype
    assert torch.equal(param.grad.full_tensor(), torch.full((2, 4), value, dtype=dtype))


@pytest.mark.parametrize(
    "kwargs", [{}, {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)}]
)
@on_threads(2)
def test_gradients_are_published_and_added_up_in_it(kwargs):
    layer = made(**kwargs)
    assert layer.weight.grad_dtype is torch.float32
    for count in (1, 2, 3):
        backward(layer)
        assert_gradient(layer.weight, 128.5 * count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])  # None: that of the parameter
@on_threads(2)
def test_it_may_be_set_on_a_sharded_parameter(dtype):
    layer = made()
    layer.weight.grad_dtype = dtype
    backward(layer)
    assert_gradient(layer.weight, 128.0, torch.bfloat16)


@on_threads(2)
def test_hooks_see_it():
    layer, seen = made(), []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    backward(layer)
    assert seen == [torch.float32]


@on_threads(2)
def test_copies_keep_it():
    layer = made()
    backward(layer)
    copied = copy.deepcopy(layer)
    backward(copied)
    for each in (layer, copied):
        assert_gradient(each.weight, 128.5)


@on_threads(2)
def test_an_assigned_parameter_gets_it_and_a_cast_keeps_it():
    layer = made()
    layer.load_state_dict({"weight": torch.ones(2, 4, dtype=torch.bfloat16)}, assign=True)
    backward(layer)
    layer.to(torch.float16)
    assert_gradient(layer.weight, 128.5)
    layer.zero_grad()
    layer(torch.full((1, 4), PER_RANK[dist.get_rank()]).half()).sum().backward()
    assert_gradient(layer.weight, 128.5)


def fill(layer):
    layer.to_empty(device="cpu")  # which drops it from a plain module
    layer.load_state_dict({"weight": torch.ones(2, 4, dtype=torch.bfloat16)})


def materialize(layer):
    meshard.materialize(layer, init=lambda module: nn.init.ones_(module.weight))


@pytest.mark.parametrize("fill", [fill, materialize])
@on_threads(2)
def test_a_model_on_meta_that_is_filled_keeps_it(fill):
    with torch.device("meta"):
        layer = made()
    fill(layer)
    backward(layer)
    assert_gradient(layer.weight, 128.5)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, meshard.local_optimizer, meshard.overlap_optimizer]
)
@on_threads(2)
def test_optimizers_that_mix_dtypes_step_by_it(make):
    layer = made()
    lr = 2.0**-8
    wanted = nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16))
    wanted.grad_dtype = torch.float32
    wanted.grad = torch.full((2, 4), 128.5)
    torch.optim.SGD([wanted], lr=lr).step()
    assert not torch.equal(wanted, torch.full_like(wanted, 0.5))  # which 128 would give
    own = [layer.parameters()] if make is torch.optim.SGD else [layer, torch.optim.SGD]
    optimizer = make(*own, lr=lr)
    backward(layer)
    optimizer.step()
    assert torch.equal(layer.weight.full_tensor(), wanted)
