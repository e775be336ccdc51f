"""``set_keep_unsharded_storage``: the memory of unsharded parameters survives resharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from tests.support.extensions import Bfloat16Whole, Int8OnWire, linear
from tests.support.insides import unsharded_storages
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import slow


def storages(module):
    """Return the address and the bytes of the memory under each unsharded parameter."""
    return [(each.data_ptr(), each.nbytes()) for each in unsharded_storages(module)]


def has_memory(module):
    return [num_bytes > 0 for _, num_bytes in storages(module)]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        slow({"reshard_after_forward": False}),
        {"reshard_after_forward": 2},
        slow({"mp_policy": meshard.MixedPrecisionPolicy(torch.bfloat16)}),
        {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["reshards", "keeps for backward", "keeps a part for backward", "casts", "offloads"],
)
@on_ranks(4)
def test_addresses_stay_and_gradients_are_the_same(kwargs):
    model, plain = (shard_blocks(IntegerModel(), **kwargs) for _ in range(2))
    model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=2.0**-5) for each in (model, plain)]
    seen = set()
    for step in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            loss = integer_loss(each(integer_batch(step, dist.get_rank())))
            if each is model:
                seen.add(tuple(storages(model)))
            loss.backward()
            optimizer.step()
        seen.add(tuple(storages(model)))
        assert all(has_memory(model)) and not any(has_memory(plain))
        assert_same(full_grads(model), full_grads(plain), bitwise=True)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert len(seen) == 1
    assert isinstance(model.shift, DTensor)  # it is resharded
    model.blocks[0].set_keep_unsharded_storage(False)  # it is resharded, so at once
    assert not any(has_memory(model.blocks[0])) and all(has_memory(model.blocks[1]))
    model.unshard()
    model.set_keep_unsharded_storage(False, recurse=False)
    assert model.shift.untyped_storage().nbytes()
    model.reshard()
    integer_loss(model(integer_batch(0, dist.get_rank()))).backward()
    assert has_memory(model) == [False] * 3 + [True] * 4


@pytest.mark.parametrize("kind", [Int8OnWire, Bfloat16Whole])
@on_threads(2)
def test_of_tensor_subclasses(kind):
    layer = meshard.fully_shard(linear(kind), init_device_mesh("cpu", (2,)))
    layer.set_keep_unsharded_storage(True)
    seen = set()
    for _ in range(3):
        layer(torch.ones(1, 3)).sum().backward()
        seen.add(tuple(storages(layer)))
    assert len(seen) == 1 and all(has_memory(layer))
    layer.set_keep_unsharded_storage(False)
    assert not any(has_memory(layer))


def gather(layer):
    layer.unshard()
    values = layer.weight.detach().clone()
    layer.reshard()
    return values


@on_ranks(1)
def test_on_the_meta_device_and_before_the_first_gather():
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    meshard.fully_shard(layer)
    layer.set_keep_unsharded_storage(True)
    assert not any(has_memory(layer))
    layer.to_empty(device="cpu")
    nn.init.ones_(layer.weight)
    assert torch.equal(gather(layer), torch.ones(3, 3))
    before = storages(layer)
    gather(layer)
    assert storages(layer) == before and all(has_memory(layer))


@on_ranks(1)
def test_a_cast_and_an_offload_free_it():
    layer = meshard.fully_shard(nn.Linear(3, 3))
    layer.set_keep_unsharded_storage(True)
    for free in (layer.float, layer.double, lambda: meshard.offload(layer)):
        gather(layer)
        assert all(has_memory(layer))
        free()
        assert not any(has_memory(layer))
    meshard.onload(layer)
    assert gather(layer).dtype == torch.float64
    assert all(has_memory(layer))


@on_ranks(1)
def test_edits_are_gathered_and_a_copy_keeps_too():
    layer = meshard.fully_shard(nn.Linear(3, 3))
    layer.set_keep_unsharded_storage(True)
    gather(layer)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    assert torch.equal(gather(layer), torch.full((3, 3), 2.0))
    copied = copy.deepcopy(layer)
    gather(copied)
    assert all(has_memory(copied))
