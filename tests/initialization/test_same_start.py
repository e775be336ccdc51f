"""Ranks that bring different values: stitched together, broadcast, or refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, fully_shard, fully_shard_units
from tests.support.models import MlpBlock, MlpStack, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks


class Normed(MlpStack):
    """Has buffers of two dtypes, one of them not contiguous."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.zeros(3, 5).t())

    def forward(self, x):
        return self.norm(super().forward(x)) + self.table.sum()


def build(seed):
    model = seeded(Normed(), seed)
    with torch.no_grad():
        model.norm.running_mean.fill_(seed)
        model.norm.num_batches_tracked.fill_(seed)
        model.table.copy_(torch.arange(15.0).view(5, 3) + seed)
    return model


def transpose(model):
    """Store a weight in another order, which must not matter (the peer refuses it)."""
    weight = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.detach().t().contiguous().t())


def bits_of_shards(model):
    return [param.to_local() for param in model.parameters()]


def synced(mesh_shape, is_peer=False, **kwargs):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = build(seed=dist.get_rank() + 1)
    with CommLedger() as ledger:
        if not is_peer:
            transpose(model)
            fully_shard_units(model, mesh, **kwargs)
        else:
            for each in (*model.blocks, model):
                torch_fsdp.fully_shard(each, mesh=mesh)
    return full_state(model), ledger.counts, ledger.events, bits_of_shards(model)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_sync_init_gives_every_rank_the_values_of_the_first(run_ranks, mesh_shape):
    expected = full_state(build(seed=1))
    num_ranks = 4 if mesh_shape == (2, 2) else mesh_shape[0]
    runs = run_ranks(synced, num_ranks, mesh_shape, sync_init=True)
    for state, counts, events, _ in runs:
        assert_same(state, expected, bitwise=True)
        # One tensor at a time, so none needs more memory than the largest.
        assert counts == {"broadcast": len(expected) * len(mesh_shape)}
        largest = max(tensor.nbytes for tensor in expected.values())
        assert max(event.payload_bytes for event in events) == largest
        assert {event.unit for event in events} == {"(sync_init)"}
    if mesh_shape == (2, 2):
        for one, other in zip(runs[0][-1], runs[2][-1], strict=True):
            assert torch.equal(one, other)


def test_without_it_values_are_stitched_like_the_peers(run_ranks):
    first, second = (full_state(build(seed=seed)) for seed in (1, 2))
    for is_peer in (False, True):
        for state, *_ in run_ranks(synced, 2, (2,), is_peer):
            name = "blocks.0.down.weight"
            assert_same(state[name][:3], first[name][:3], bitwise=True)
            assert_same(state[name][3:], second[name][3:], bitwise=True)


def again():
    model = build(seed=1)
    fully_shard_units(model, sync_init=True)
    with torch.no_grad():
        model.norm.running_mean.fill_(dist.get_rank())
    with CommLedger() as ledger:
        fully_shard_units(model, sync_init=True)
    return model.norm.running_mean[0].item(), ledger.counts


def test_a_second_call_sends_nothing(run_ranks):
    assert run_ranks(again, 2) == [(0.0, {}), (1.0, {})]


def ignoring():
    model = build(seed=dist.get_rank() + 1)
    own = model.scale.detach().clone()
    fully_shard_units(model, sync_init=True, ignored_params={model.scale})
    return torch.equal(model.scale, own)


def test_ignored_parameters_stay_what_they_are(run_ranks):
    assert run_ranks(ignoring, 2) == [True, True]


# --- MESHARD_DEBUG ------------------------------------------------------------------------------


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")


def different(mesh_shape, change):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = seeded(MlpStack())
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            change(model)
    try:
        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh)
    except RuntimeError as error:
        return str(error), isinstance(model.blocks[1], meshard.FSDPModule)
    return "", True


def edit_one_bit(model):
    weight = model.blocks[1].down.weight
    weight[5, 9] = torch.nextafter(weight[5, 9], torch.tensor(9.0))


def swap_two(model):
    bias = model.blocks[1].up.bias
    bias[:2] = bias[:2].flip(0)


def reseed(model):
    seeded(model, seed=3)


@pytest.mark.parametrize(
    ("change", "first", "num_differing"),
    [(edit_one_bit, "down.weight", 1), (swap_two, "up.bias", 1), (reseed, "up.weight", 4)],
)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_different_values_are_refused_and_named(
    run_ranks, debug, mesh_shape, change, first, num_differing
):
    num_ranks = 4 if mesh_shape == (2, 2) else 2
    for message, is_sharded in run_ranks(different, num_ranks, mesh_shape, change):
        assert f"different values to one unit (MlpBlock): of its 4 parameters {num_differing}" in (
            message
        )
        assert f"first {first!r}, where rank(s) {num_ranks - 1} differ from rank 0." in message
        assert "fully_shard_units(..., sync_init=True)" in message
        assert not is_sharded


@on_ranks(2)
def test_signs_of_float64_are_compared_too(monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    layer = seeded(nn.Linear(4, 4, dtype=torch.float64))
    if dist.get_rank():
        with torch.no_grad():
            layer.weight.neg_()
    with pytest.raises(RuntimeError, match="of its 2 parameters 1 differ, first 'weight'"):
        fully_shard(layer)


def one_rank_differs_where_shards_are_the_first_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    layer = seeded(nn.Linear(4, 4), seed=int(dist.get_rank() == 1))
    axes = meshard.DataParallelMeshDims(shard="shard", replicate="replicate")
    with pytest.raises(RuntimeError, match=r"where rank\(s\) 1 differ from rank 0\."):
        fully_shard(layer, mesh, dp_mesh_dims=axes)


def test_the_right_ranks_are_named_whatever_the_order_of_the_axes(run_ranks, debug):
    run_ranks(one_rank_differs_where_shards_are_the_first_axis, 4)


def nothing(model):
    pass


def test_equal_values_pass(run_ranks, debug):
    assert run_ranks(different, 3, (3,), nothing) == [("", True)] * 3


def other_models():
    model = MlpBlock(4, 4 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"different parameters as one unit \(MlpBlock\)"):
        fully_shard(model)
    model = nn.Linear(4, 4, bias=dist.get_rank() == 0)
    with pytest.raises(RuntimeError, match=r"rank 0: 2, rank 1: 1"):
        fully_shard(model)


def test_different_models_are_refused_and_counted(run_ranks, debug):
    run_ranks(other_models, 2)


def synced_in_debug():
    model = build(seed=dist.get_rank() + 1)
    fully_shard_units(model, sync_init=True)
    with torch.device("meta"):
        other = MlpStack()
    fully_shard_units(other)
    return full_state(model)


def test_sync_init_passes_the_check_and_meta_models_too(run_ranks, debug):
    for state in run_ranks(synced_in_debug, 2):
        assert_same(state, full_state(build(seed=1)), bitwise=True)


# --- without it: before the first reduction -----------------------------------------------------


def started(mesh_shape, how):
    """Return the warnings of two steps, and the events of the ledger."""
    rank = dist.get_rank()
    model = seeded(MlpStack(), seed=rank if how != "alike" else 1)
    if how == "one rank loads":
        model = seeded(model, seed=1)
        if rank == 1:
            model.blocks[1].load_state_dict(seeded(MlpStack(), seed=4).blocks[1].state_dict())
    mesh = init_device_mesh("cpu", mesh_shape)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh)
    if how == "loaded after":
        model.load_state_dict(seeded(MlpStack()).state_dict())
    if how == "written by data":  # which no version of a tensor shows
        for param in model.parameters():
            param.data.copy_(torch.ones(()))
    build, kwargs = torch.optim.SGD, {"lr": 0.1}
    if how == "overlapped":
        optimizer = meshard.overlap_optimizer(model, build, **kwargs)
    else:
        optimizer = build(model.parameters(), **kwargs)
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
    return told, {event.unit for event in ledger.events}


HOW = ["alike", "differ", "loaded after", "one rank loads"]
HOW += ["written by data", "overlapped", "accumulated"]


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@pytest.mark.parametrize("how", HOW)
def test_the_first_reduction_compares_what_ranks_brought(run_ranks, mesh_shape, how):
    num_ranks = 4 if mesh_shape == (2, 2) else 2
    others = {"one rank loads": "1", "alike": "", "loaded after": "", "written by data": ""}
    others = others.get(how, ", ".join(map(str, range(1, num_ranks))))
    for (first, second), units in run_ranks(started, num_ranks, mesh_shape, how):
        assert len(first) == bool(others)
        for text in first:
            assert f"rank(s) {others} differ from rank 0" in text
            assert "fully_shard_units(..., sync_init=True)" in text
        assert second == [] and not any("same start" in unit for unit in units)
