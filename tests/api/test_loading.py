"""Loading of whole tensors, and of shards from elsewhere, into a sharded module."""

import copy
import gc
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshard
from meshard import CommLedger
from tests.support.cases import CASES
from tests.support.models import seeded
from tests.support.normed import BATCH, same_models, values
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


def load_whole(assign, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = shard_blocks(values(1), mesh)
    model(BATCH)  # leaves a root, and a graph, with the old values
    wanted = values(2)
    given = {name: value.clone() for name, value in wanted.state_dict().items()}
    before = dict(given)
    with CommLedger(model) as ledger:
        result = model.load_state_dict(given, assign=assign)
    assert not ledger.counts
    assert result.missing_keys == result.unexpected_keys == []
    assert given.keys() == before.keys() and all(given[k] is v for k, v in before.items())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    same_models(model, wanted, BATCH)
    # A submodule that is a unit, and one that is inside of one.
    other = values(3)
    for of, to in ((other, model), (other, wanted)):
        to.blocks[1].load_state_dict(copy.deepcopy(of.blocks[1].state_dict()), assign=assign)
        to.blocks[0].up.load_state_dict(copy.deepcopy(of.blocks[0].up.state_dict()), assign=assign)
    same_models(model, wanted, BATCH)
    assert model.head.weight is model.second_head.weight


@pytest.mark.parametrize("assign", [False, True])
def test_whole_tensors_are_loaded_without_communication(run_ranks, assign):
    run_ranks(load_whole, 2, assign, (2,))


def test_whole_tensors_are_loaded_on_a_2d_mesh(run_ranks):
    run_ranks(load_whole, 4, False, (2, 2))


@on_ranks(3)
@pytest.mark.parametrize("assign", [False, True])
def test_whole_tensors_are_cut_on_any_dim(assign):
    mesh = init_device_mesh("cpu", (3,))
    model, wanted = CASES["uneven"].build(), seeded(CASES["uneven"].build(), 4)
    for layer in (*model.layers, model):
        meshard.fully_shard(layer, mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))
    model.load_state_dict(wanted.state_dict(), assign=assign)
    assert_same(full_state(model), full_state(wanted), bitwise=True)
    for param, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        # Not a view, which would keep the whole tensor, or see its edits.
        assert param.to_local().untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    batch = CASES["uneven"].batch(0, 0)
    assert_same(model(batch), wanted(batch))


def reported(model, given, **kwargs):
    try:
        result = model.load_state_dict(given, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error).replace("FSDP", "")
    return sorted(result.missing_keys), sorted(result.unexpected_keys)


@on_ranks(2)
def test_what_does_not_fit_is_reported_as_torch_does():
    mesh = init_device_mesh("cpu", (2,))
    model, plain = shard_blocks(values(1), mesh), values(1)
    right = values(2).state_dict()
    partial = {name: value for name, value in right.items() if "blocks.0" in name}
    wrong_shape = {**right, "blocks.0.up.weight": torch.ones(3, 3), "scale": torch.ones(3)}
    extra = {**right, "blocks.0.up.more": torch.ones(2), "nothing": torch.ones(2)}
    no_tensor = {**right, "scale": [1.0]}
    for given in (partial, wrong_shape, extra, no_tensor):
        for strict in (True, False):
            for assign in (True, False):
                ours = reported(model, given, strict=strict, assign=assign)
                theirs = reported(plain, given, strict=strict, assign=assign)
                assert ours == theirs, (list(given), strict, assign)
    mixed = {
        name: distribute_tensor(value, mesh, [Shard(0)]) if "blocks" in name else value
        for name, value in values(5).state_dict().items()
    }
    model.load_state_dict(mixed)
    same_models(model, values(5), BATCH)


@on_ranks(4)
@pytest.mark.parametrize("assign", [False, True])
def test_shards_of_another_mesh_are_loaded(assign):
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    model = shard_blocks(values(1), grid)
    wanted = values(2)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for mesh, placements in (
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (grid, [Shard(0), Replicate()]),
    ):
        wanted = values(wanted.norm.num_batches_tracked.item() + 1)
        given = copy.deepcopy(wanted.state_dict())
        for name in parameters:
            given[name] = distribute_tensor(given[name], mesh, placements)
        model.load_state_dict(given, assign=assign)
        assert all(param.device_mesh == grid for param in model.parameters())
        same_models(model, wanted, BATCH)


@on_ranks(2)
def test_shards_of_a_mesh_without_this_rank_are_refused():
    model = shard_blocks(values(1), init_device_mesh("cpu", (2,)))
    alone = DeviceMesh("cpu", [0])
    given = values(2).state_dict()
    given["scale"] = DTensor.from_local(given["scale"], alone, [Replicate()], run_check=False)
    if dist.get_rank() == 0:
        model.load_state_dict(given)
        return
    with pytest.raises(RuntimeError, match=r"'scale' cannot be loaded .* not part of that mesh"):
        model.load_state_dict(given)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_while_a_unit_is_whole_is_not_lost(assign):
    """While a unit is whole by hand, what is loaded is in the shards all the same."""
    model = shard_blocks(values(1), init_device_mesh("cpu", (2,)))
    wanted = values(2)
    for giver in (wanted, shard_blocks(values(2), model.scale.device_mesh)):
        given = copy.deepcopy(giver.state_dict())
        model.load_state_dict(values(1).state_dict())
        model.blocks[0].unshard()
        model.load_state_dict(given, assign=assign)
        model.blocks[0].reshard()
        same_models(model, wanted, BATCH)


@on_ranks(2)
def test_a_whole_parameter_that_is_assigned_becomes_a_shard():
    model = shard_blocks(values(1), init_device_mesh("cpu", (2,)))
    plain = values(1)
    model(BATCH), plain(BATCH)
    other = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
    for each in (model, plain):
        each.blocks[0].up.weight = nn.Parameter(other.clone())
        each.head.weight = nn.Parameter(torch.eye(6), requires_grad=False)
        each.second_head.weight = each.head.weight
        each.eval()
    assert_same(model(BATCH), plain(BATCH))
    assert isinstance(model.blocks[0].up.weight, DTensor)
    assert not model.head.weight.requires_grad
    same_models(model, plain, BATCH)
    model.blocks[1].up.weight = nn.Parameter(torch.ones(4, 6))
    with pytest.raises(RuntimeError, match=r"'up.weight' of unit 'blocks.1' .* shape \(4, 6\)"):
        model(BATCH)


@on_ranks(2)
def test_loading_keeps_no_whole_tensor():
    """Loading keeps nothing of the whole tensors."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
    for assign in (False, True):
        given = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
        storages = [value.untyped_storage() for value in given.values()]
        model.load_state_dict(given, assign=assign)
        del given
        gc.collect()
        assert all(sys.getrefcount(storage) <= 3 for storage in storages)
        for param in model.parameters():
            local = param.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes
            assert torch.equal(param.full_tensor(), torch.ones(param.shape))
