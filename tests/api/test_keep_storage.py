"""``set_keep_unsharded_storage``: the memory of unsharded parameters survives resharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard._engine.unit import units_in
from tests.support.extensions import Bfloat16Whole, Int8OnWire, Wrapper, linear
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads
from tests.support.sharding import shard_blocks
from tests.support.threads import run_threads


def storages(module):
    """Return the address and the bytes of the memory under each unsharded parameter."""
    found = []
    for unit in units_in(module):
        for param in unit.params:
            unsharded = param.unsharded
            memory = unsharded.inner if isinstance(unsharded, Wrapper) else unsharded
            storage = memory.untyped_storage()
            found.append((storage.data_ptr(), storage.nbytes()))
    return found


def backward(model, step):
    integer_loss(model(integer_batch(step, dist.get_rank()))).backward()


def keeps(**kwargs):
    mesh = init_device_mesh("cpu", (2,))
    model, plain = (shard_blocks(IntegerModel(), mesh, **kwargs) for _ in range(2))
    model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=2.0**-5) for each in (model, plain)]
    seen = set()
    for step in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            backward(each, step)
            optimizer.step()
        seen.add(tuple(storages(model)))
        assert all(not num_bytes for _, num_bytes in storages(plain))
        assert_same(full_grads(model), full_grads(plain), bitwise=True)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert len(seen) == 1 and all(num_bytes for _, num_bytes in seen.pop())
    assert isinstance(model.shift, torch.distributed.tensor.DTensor)  # it is resharded
    return model


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": meshard.MixedPrecisionPolicy(torch.bfloat16)},
        {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["reshards", "keeps for backward", "casts", "offloads"],
)
def test_addresses_stay_and_gradients_are_the_same(run_ranks, kwargs):
    run_ranks(train_and_free, 2, **kwargs)


def train_and_free(**kwargs):
    model = keeps(**kwargs)
    model.blocks[0].set_keep_unsharded_storage(False)  # it is resharded, so at once
    assert [bool(num_bytes) for _, num_bytes in storages(model.blocks[0])] == [False, False]
    assert all(num_bytes for _, num_bytes in storages(model.blocks[1]))
    model.unshard()
    model.set_keep_unsharded_storage(False, recurse=False)
    assert model.shift.untyped_storage().nbytes()
    model.reshard()
    backward(model, 0)
    assert [num_bytes > 0 for _, num_bytes in storages(model)] == [False] * 3 + [True] * 4


@on_threads(4)
def test_with_a_smaller_group_after_forward():
    model = shard_blocks(IntegerModel(), init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    model.set_keep_unsharded_storage(True)
    addresses = set()
    for step in range(2):
        loss = integer_loss(model(integer_batch(step, dist.get_rank())))
        addresses.add(tuple(storages(model)))
        loss.backward()
        addresses.add(tuple(storages(model)))
    assert len(addresses) == 1


@pytest.mark.parametrize("kind", [Int8OnWire, Bfloat16Whole])
def test_of_tensor_subclasses(kind):
    def run():
        layer = meshard.fully_shard(linear(kind), init_device_mesh("cpu", (2,)))
        layer.set_keep_unsharded_storage(True)
        seen = set()
        for _ in range(3):
            layer(torch.ones(1, 3)).sum().backward()
            seen.add(tuple(storages(layer)))
        assert len(seen) == 1 and all(num_bytes for _, num_bytes in seen.pop())
        layer.set_keep_unsharded_storage(False)
        assert all(not num_bytes for _, num_bytes in storages(layer))

    run_threads(run, 2)


def gather(layer):
    layer.unshard()
    values = layer.weight.detach().clone()
    layer.reshard()
    return values


@pytest.fixture
def one_rank():
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_on_the_meta_device_and_before_the_first_gather():
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    meshard.fully_shard(layer)
    layer.set_keep_unsharded_storage(True)
    assert all(not num_bytes for _, num_bytes in storages(layer))
    layer.to_empty(device="cpu")
    nn.init.ones_(layer.weight)
    assert torch.equal(gather(layer), torch.ones(3, 3))
    before = storages(layer)
    gather(layer)
    assert storages(layer) == before and all(num_bytes for _, num_bytes in before)


@pytest.mark.usefixtures("one_rank")
def test_a_cast_and_an_offload_free_it():
    layer = meshard.fully_shard(nn.Linear(3, 3))
    layer.set_keep_unsharded_storage(True)
    gather(layer)
    layer.float()  # changes nothing
    assert all(not num_bytes for _, num_bytes in storages(layer))
    gather(layer)
    layer.double()
    assert all(not num_bytes for _, num_bytes in storages(layer))
    assert gather(layer).dtype == torch.float64
    assert all(num_bytes for _, num_bytes in storages(layer))
    meshard.offload(layer)
    assert all(not num_bytes for _, num_bytes in storages(layer))
    meshard.onload(layer)
    gather(layer)
    assert all(num_bytes for _, num_bytes in storages(layer))


@pytest.mark.usefixtures("one_rank")
def test_edits_are_gathered_and_a_copy_keeps_too():
    layer = meshard.fully_shard(nn.Linear(3, 3))
    layer.set_keep_unsharded_storage(True)
    gather(layer)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    assert torch.equal(gather(layer), torch.full((3, 3), 2.0))
    copied = copy.deepcopy(layer)
    gather(copied)
    assert all(num_bytes for _, num_bytes in storages(copied))
    with pytest.raises(TypeError, match="keep must be a bool"):
        layer.set_keep_unsharded_storage(1)
