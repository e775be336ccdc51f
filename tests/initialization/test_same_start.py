"""Ranks that bring different values: stitched together, broadcast, or refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, fully_shard, fully_shard_units
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import spread


def build(seed):
    """Return a model with buffers of two dtypes, one not contiguous and two expanded."""
    model = MlpStack()
    model.norm = nn.BatchNorm1d(6)
    model.register_buffer("table", (torch.arange(15.0).view(3, 5) + seed).t())
    row = torch.full((1, 3), float(seed)).expand(4, 3)
    # A rank may have loaded it with assign=True.
    model.register_buffer("row", row if dist.get_rank() else row.clone())
    model.register_buffer("all_alike", torch.tensor(float(seed)).expand(2, 3))
    model.norm.running_mean.fill_(seed)
    model.norm.num_batches_tracked.fill_(seed)
    return seeded(model, seed)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_ranks(4)
def test_sync_init_gives_every_rank_the_values_of_the_first(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    model, expected = build(seed=dist.get_rank() + 1), full_state(build(seed=1))
    # A weight that is stored in another order, which must not matter (the peer refuses it).
    weight = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.detach().t().contiguous().t())
    fully_shard_units(model, mesh, sync_init=True)
    assert_same(full_state(model), expected, bitwise=True)  # in each replica
    with CommLedger() as ledger:
        fully_shard_units(model, sync_init=True)  # a second call sends nothing
    assert not ledger.counts


@on_ranks(2)
def test_ignored_parameters_stay_what_they_are():
    model = build(seed=dist.get_rank() + 1)
    own = model.scale.detach().clone()
    fully_shard_units(model, sync_init=True, ignored_params={model.scale})
    assert torch.equal(model.scale, own)


@on_ranks(2)
def test_sync_init_is_refused_without_values():
    model = build(seed=1).to("meta")
    with pytest.raises(ValueError, match=r"' is on the meta device.*broadcast_from_rank0"):
        fully_shard_units(model, sync_init=True)
    assert not isinstance(model, meshard.FSDPModule)


@on_ranks(2)
def test_without_it_values_are_stitched_together():
    model = shard_blocks(build(seed=dist.get_rank() + 1))
    for rank, rows in enumerate((slice(0, 3), slice(3, 6))):
        expected = build(seed=rank + 1).blocks[0].down.weight
        found = model.blocks[0].down.weight.full_tensor()
        assert_same(found[rows], expected[rows], bitwise=True)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")


def first_reduction(model):
    model(torch.ones(2, 6)).sum().backward()


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_ranks(4)
def test_different_values_are_an_error_of_the_first_reduction_under_debug(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = shard_blocks(seeded(MlpStack(), seed=int(dist.get_rank() == 3)), mesh)
    with pytest.raises(RuntimeError, match=r"rank\(s\) 3 differ from rank 0") as caught:
        first_reduction(model)
    assert "fully_shard_units(..., sync_init=True)" in str(caught.value)
    shard_blocks(seeded(MlpStack()), mesh)


@on_ranks(4)
def test_the_right_ranks_are_named_whatever_the_order_of_the_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    layer = seeded(nn.Linear(4, 4), seed=int(dist.get_rank() == 1))
    axes = meshard.DataParallelMeshDims(shard="shard", replicate="replicate")
    fully_shard(layer, mesh, dp_mesh_dims=axes)
    with pytest.warns(UserWarning, match=r"rank\(s\) 1 differ from rank 0,"):
        layer(torch.ones(1, 4)).sum().backward()


@pytest.mark.usefixtures("debug")
@on_ranks(3)
def test_equal_values_and_sync_init_pass_the_check_and_meta_models_too():
    first_reduction(shard_blocks(seeded(MlpStack())))
    model = build(seed=dist.get_rank() + 1)
    fully_shard_units(model, sync_init=True)
    first_reduction(model)
    assert_same(full_state(model), full_state(build(seed=1)), bitwise=True)
    with torch.device("meta"):
        other = MlpStack()
    fully_shard_units(other)


HOW = ["differ", "alike", "loaded after", "one rank loads"]
HOW += ["written by data", "overlapped", "accumulated"]


@spread(how=HOW, mesh_shape=[(2, 2), (4,)])
@on_ranks(4)
def test_the_first_reduction_compares_what_ranks_brought(how, mesh_shape):
    rank = dist.get_rank()
    model = seeded(MlpStack(), seed=rank if how not in ("alike", "one rank loads") else 1)
    if how == "one rank loads" and rank == 1:
        model.blocks[1].load_state_dict(seeded(MlpStack(), seed=4).blocks[1].state_dict())
    shard_blocks(model, init_device_mesh("cpu", mesh_shape))
    if how == "loaded after":
        model.load_state_dict(seeded(MlpStack()).state_dict())
    if how == "written by data":  # which no version of a tensor shows
        for param in model.parameters():
            param.data.copy_(torch.ones(()))
    if how == "overlapped":
        optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    with CommLedger() as ledger:
        for step in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if step == 0 and how == "accumulated":
                    with meshard.no_sync(model):
                        model(torch.ones(2, 6)).sum().backward()
                    assert not caught
                model(torch.ones(2, 6)).sum().backward()
                if rank == 0 or step > 0:  # a rank may skip a step
                    optimizer.step()
                optimizer.zero_grad()
            told.append([str(each.message) for each in caught])
    others = {"one rank loads": "1", "alike": "", "loaded after": "", "written by data": ""}
    others = others.get(how, "1, 2, 3")
    first, second = told
    assert len(first) == bool(others) and not second
    for text in first:
        assert f"rank(s) {others} differ from rank 0" in text
        assert "fully_shard_units(..., sync_init=True)" in text
    assert not any("initial values" in event.unit for event in ledger.events)


@pytest.mark.parametrize("loading", [(0,), (0, 1, 2)])
@on_ranks(3)
def test_weights_that_only_some_ranks_load_after_sharding_are_warned_about(loading):
    model = shard_blocks(seeded(MlpStack(dim=4)))  # the last rank owns no row of some weights
    if dist.get_rank() in loading:
        model.load_state_dict(seeded(MlpStack(dim=4), seed=1).state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    told = [str(each.message).split(", so")[0] for each in caught]
    some = "rank(s) 0 have loaded or changed their weights since fully_shard, and rank(s) 1, 2 have"
    assert told == ([f"{some} not"] if loading == (0,) else [])
