"""Copying, loading, editing and initializing of cut parameters and over several meshes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard import DataParallelMeshDims, ShardPlacementResult
from tests.mesh import expert_meshes as several
from tests.mesh import tensor_parallel as cut
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread

MODELS = {
    "cut": (cut.build, lambda: cut.batches(1, 0)[0]),
    "several": (several.build, lambda: several.batch_of(0, 0)),
}


def sharded(kind, **kwargs):
    if kind == "several":
        return several.shard(several.build(), "flat", **kwargs)
    data, tp, _ = cut.meshes("dp")
    return shard_blocks(cut.cut(cut.build(), tp, "tensor"), data, **kwargs)


def step(model, batch):
    """Return the gradients of one step, which is taken."""
    model.zero_grad()
    model(batch).square().mean().backward()
    grads = full_grads(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(param.grad, alpha=-0.1)
    return grads


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_trains_by_itself(kind):
    model = sharded(kind)
    batch = MODELS[kind][1]()
    step(model, batch)
    copied = copy.deepcopy(model)
    assert_same(full_state(copied), full_state(model), bitwise=True)
    for one, other in zip(copied.parameters(), model.parameters(), strict=True):
        assert one.placements == other.placements and one is not other
    kept = full_state(model)
    grads = step(copied, batch)
    assert_same(full_state(model), kept, bitwise=True)
    assert_same(step(model, batch), grads)
    assert_same(full_state(model), full_state(copied))


@on_threads(4)
@spread(assign=[False, True], kind=MODELS)
def test_whole_tensors_are_loaded(kind, assign):
    model = sharded(kind)
    plain = seeded(MODELS[kind][0](), seed=5)
    model.load_state_dict(plain.state_dict(), assign=assign)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    batch = MODELS[kind][1]()
    assert_same(step(model, batch), step(plain, batch))
    assert_same(full_state(model), full_state(plain))


@on_threads(4)
@pytest.mark.parametrize("kind", MODELS)
def test_open_parameters_are_edited_and_computed_with(kind):
    model, plain = sharded(kind), MODELS[kind][0]()
    batch = MODELS[kind][1]()
    with meshard.unsharded_params(model):
        if kind == "cut":
            weight = model.blocks[0].up.weight
            assert isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("tp",)
        else:
            weights = model.blocks[0].expert.weight, model.blocks[0].dense.weight
            assert all(type(weight) is nn.Parameter for weight in weights)
        assert_same(model(batch), plain(batch))
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(1.5)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    with meshard.unsharded_params(model):
        loss = model(batch).square().mean()
    loss.backward()
    plain(batch).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))
    assert_same(step(model, batch), step(plain, batch))


@on_threads(4)
def test_forward_called_directly_enters_all_meshes():
    model = sharded("several")
    batch = several.batch_of(0, 0)
    model.forward(batch).square().mean().backward()
    plain = several.build()
    plain(batch).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))
    assert all(isinstance(param, DTensor) for param in model.parameters())


class Reader(nn.Module):
    """Reads the weights of a block instead of calling it."""

    def __init__(self):
        super().__init__()
        self.block = several.Block(5)

    def forward(self, x):
        dense, expert = self.block.dense, self.block.expert
        return x @ dense.weight @ expert.weight + dense.bias + expert.bias


@on_threads(4)
def test_a_read_gathers_all_meshes():
    most, of_experts = several.meshes("flat")
    model = seeded(Reader())
    experts = set(model.block.expert.parameters())
    meshard.fully_shard(
        model.block,
        most,
        unshard_on_access=True,
        shard_placement_fn=lambda param: (
            ShardPlacementResult(Shard(0), of_experts) if param in experts else None
        ),
    )
    meshard.fully_shard(model, most)
    plain = seeded(Reader())
    batch = several.batch_of(0, 0)
    for _ in range(2):
        assert_same(step(model, batch), step(plain, batch))
    assert all(isinstance(param, DTensor) for param in model.parameters())


class Deep(nn.Module):
    """What draws its values by reset_parameters only."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)


def materialize_cut():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Deep()
    cut.parallelize_module(model, world["tp"], cut.tensor_plan())
    meshard.fully_shard(model, world["dp"])
    torch.manual_seed(3 + dist.get_rank())
    meshard.materialize(model)
    return full_state(model)


def test_materialized_values_are_those_of_a_model_that_nothing_has_cut(run_ranks):
    torch.manual_seed(3)
    expected = full_state(Deep())
    for state in run_ranks(materialize_cut, 4, timeout=200):
        assert_same(state, expected, bitwise=True)


@on_threads(4)
def test_sync_init_evens_out_over_each_parameters_own_mesh():
    """Experts differ from one half of the ranks to the other, and are to stay so."""
    most, of_experts = several.meshes("flat")
    half = dist.get_rank() // 2
    model = seeded(several.Block(5), seed=dist.get_rank())
    experts = set(model.expert.parameters())
    meshard.fully_shard_units(
        model,
        most,
        units=nn.Linear,
        sync_init=True,
        shard_placement_fn=lambda param: (
            ShardPlacementResult(Shard(0), of_experts) if param in experts else None
        ),
    )
    first_of_all = full_state(seeded(several.Block(5), seed=0))
    first_of_half = full_state(seeded(several.Block(5), seed=2 * half))
    for name, value in full_state(model).items():
        assert torch.equal(value, (first_of_half if "expert" in name else first_of_all)[name])


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("kind", ["several", "replicas only"])
def test_ranks_compare_notes_on_every_mesh(kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_DEBUG", "1")
        if kind == "several":
            half = dist.get_rank() // 2
            model = several.build()
            for name, param in model.named_parameters():
                if several.is_expert(name):
                    param.data.add_(half)  # which is no difference on their own mesh
            several.shard(model, "flat")
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = seeded(nn.Sequential(nn.Linear(5, 5)))
            dims = DataParallelMeshDims(replicate="dp")
            meshard.fully_shard(model, mesh, dp_mesh_dims=dims)
        step(model, several.batch_of(0, 0))
