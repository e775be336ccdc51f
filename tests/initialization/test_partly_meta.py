"""A unit whose adapters have values while the base that they are beside is on the meta device."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.models import Adapted, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads

DIM = 6


def partly_meta(seed=1, **kwargs):
    """Return a unit with adapters of ``seed``, and a base without values."""
    layer = seeded(Adapted(DIM), seed)
    with torch.device("meta"):
        layer.base = nn.Linear(DIM, DIM).requires_grad_(False)
    return meshard.fully_shard(layer, init_device_mesh("cpu", (dist.get_world_size(),)), **kwargs)


def load_base(layer):
    layer.base.to_empty(device="cpu")
    with torch.no_grad():
        layer.base.weight.fill_(0.5), layer.base.bias.fill_(0.25)


def adapters(layer):
    return {name: layer.get_parameter(name) for name in ("down.weight", "up.weight")}


def backward(layer):
    layer(torch.full((2, DIM), 1.0 + dist.get_rank())).sum().backward()


@pytest.mark.parametrize("how", ["alike", "differ", "loaded later", "one rank has the base"])
@on_ranks(2)
def test_the_first_reduction_compares_what_had_values(how):
    rank = dist.get_rank()
    if how == "one rank has the base":
        layer = seeded(Adapted(DIM), rank)
        if rank == 1:
            layer.base.to("meta")
        meshard.fully_shard(layer)
        if rank == 1:
            layer.base.to_empty(device="cpu")
    else:
        layer = partly_meta(seed=1 if how == "alike" else rank)
        load_base(layer)
    if how == "loaded later":
        with torch.no_grad():
            for param in adapters(layer).values():
                param.fill_(0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(layer)
    assert len(caught) == (how == "differ")
    for warning in caught:
        assert "rank(s) 1 differ from rank 0" in str(warning.message)


@on_threads(2)
def test_offload_moves_what_has_values_and_brings_it_back():
    layer, other = partly_meta(), partly_meta()
    before = {name: param.full_tensor() for name, param in adapters(layer).items()}
    held = {name: param.to_local() for name, param in adapters(layer).items()}
    meshard.offload(layer)
    for name, param in adapters(layer).items():
        assert param.to_local().data_ptr() != held[name].data_ptr()
    assert layer.base.weight.to_local().is_meta
    meshard.onload(layer)
    assert_same({n: p.full_tensor() for n, p in adapters(layer).items()}, before, bitwise=True)
    with meshard.offload(layer):
        load_base(layer)
    load_base(other)
    for each in (layer, other):
        backward(each)
    assert_same(full_grads(layer), full_grads(other), bitwise=True)


@pytest.mark.parametrize(
    "kwargs", [{}, {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)}]
)
@on_threads(2)
def test_a_copy_has_values_of_its_own(kwargs):
    layer = partly_meta(**kwargs)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for param in adapters(copied).values():
            param.add_(1.0)
    for name, param in adapters(copied).items():
        assert torch.equal(param.full_tensor(), layer.get_parameter(name).full_tensor() + 1.0)
    assert copied.base.weight.to_local().is_meta
    load_base(copied)
    backward(copied)
    with pytest.raises(RuntimeError, match="still on the meta device"):
        layer(torch.ones(1, DIM))
    load_base(layer)
    with torch.no_grad():
        for param in adapters(layer).values():
            param.add_(1.0)
    backward(layer)
    assert_same(full_state(layer), full_state(copied), bitwise=True)
    assert_same(full_grads(layer), full_grads(copied), bitwise=True)


@on_threads(2)
def test_values_survive_where_the_base_is_filled_in_two_parts():
    layer = partly_meta()
    before = {name: param.full_tensor() for name, param in adapters(layer).items()}
    layer.base.weight = nn.Parameter(torch.ones(DIM, DIM), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"'base\.bias' .* is still on the meta device"):
        layer(torch.ones(1, DIM))
    layer.base.bias = nn.Parameter(torch.ones(DIM), requires_grad=False)
    backward(layer)
    assert_same({n: p.full_tensor() for n, p in adapters(layer).items()}, before, bitwise=True)
    assert torch.equal(layer.base.weight.full_tensor(), torch.ones(DIM, DIM))
