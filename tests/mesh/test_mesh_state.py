"""Copying, loading, editing and initializing of cut parameters and over several meshes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import DataParallelMeshDims
from tests.mesh import expert_meshes as several
from tests.mesh import tensor_parallel as cut
from tests.support.against_plain import SGD, check_gradients, check_training
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread

KINDS = {"cut": cut, "several": several}


def sharded_and_plain(kind):
    """Return both models, and the loss of the batch that all ranks have."""
    if kind == "several":
        model = several.shard(several.build(), "flat")
    else:
        data, tp = cut.meshes("dp")
        model = shard_blocks(cut.cut(cut.build(), tp, "tensor"), data)
    batch = KINDS[kind].batch_of(0)
    return model, KINDS[kind].build(), lambda each, rank: each(batch).square().mean()


@on_threads(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_trains_by_itself(kind):
    model, plain, loss = sharded_and_plain(kind)
    check_training(model, plain, loss, steps=1)
    copied, trained = copy.deepcopy(model), copy.deepcopy(plain)
    for (name, one), other in zip(copied.named_parameters(), model.parameters(), strict=True):
        assert one.placements == other.placements and one is not other, name
    check_training(copied, trained, loss)
    assert_same(full_state(model), full_state(plain))
    check_training(model, plain, loss)


@on_threads(4)
@spread(assign=[False, True], kind=KINDS)
def test_unsharded_tensors_are_loaded(kind, assign):
    model, plain, loss = sharded_and_plain(kind)
    seeded(plain, seed=5)
    model.load_state_dict(plain.state_dict(), assign=assign)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    check_training(model, plain, loss, steps=1)


@on_threads(4)
@pytest.mark.parametrize("kind", KINDS)
def test_unsharded_params_are_edited_and_computed_with(kind):
    model, plain, loss = sharded_and_plain(kind)
    with meshard.unsharded_params(model):
        if kind == "cut":
            weight = model.blocks[0].up.weight
            assert isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("tp",)
        else:
            weights = model.blocks[0].expert.weight, model.blocks[0].dense.weight
            assert all(type(weight) is nn.Parameter for weight in weights)
        assert_same(loss(model, 0), loss(plain, 0))
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(1.5)
    assert_same(full_state(model), full_state(plain), bitwise=True)

    def computed_inside(each, rank):
        if each is plain:
            return loss(each, rank)
        with meshard.unsharded_params(model):
            return loss(each, rank)

    check_gradients(model, plain, computed_inside)
    check_gradients(model, plain, loss)


@on_threads(4)
def test_a_read_gathers_all_meshes():
    def read(model, x):
        dense, expert = model.block.dense, model.block.expert
        return x @ dense.weight @ expert.weight + dense.bias + expert.bias

    most, of_experts = several.meshes("flat")
    model, plain = (seeded(Made(read, block=several.block())) for _ in range(2))
    placement_fn = several.experts_on(of_experts, model)
    meshard.fully_shard(model.block, most, unshard_on_access=True, shard_placement_fn=placement_fn)
    meshard.fully_shard(model, most)
    check_training(model, plain, lambda each, rank: each(several.batch_of(0)).square().mean())
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("kind", KINDS)
def test_materialized_values_are_those_of_a_model_on_one_process(kind):
    def build():
        if kind == "cut":
            layers = {"up": nn.Linear(6, 7), "down": nn.Linear(7, 6)}
            return Made(None, **layers)  # what draws its values by reset_parameters only
        model = several.net()
        model.reset_parameters = lambda: nn.init.ones_(model.scale)
        return model

    with torch.device("meta"):
        model = build()
    if kind == "cut":
        data, tp = cut.meshes("dp")
        cut.parallelize_module(model, tp, cut.tensor_plan())
        meshard.fully_shard(model, data)
    else:
        several.shard(model, "flat")
    torch.manual_seed(3 + (dist.get_rank() if kind == "cut" else 0))
    meshard.materialize(model)
    torch.manual_seed(3)
    plain = build()
    getattr(plain, "reset_parameters", dict)()
    assert_same(full_state(model), full_state(plain), bitwise=True)


@on_threads(4)
def test_sync_init_evens_out_over_each_parameters_own_mesh():
    """Experts differ from one half of the ranks to the other, and are to stay so."""
    most, of_experts = several.meshes("flat")
    model = seeded(several.block(), seed=dist.get_rank())
    placement_fn = several.experts_on(of_experts, model)
    meshard.fully_shard_units(
        model, most, units=nn.Linear, sync_init=True, shard_placement_fn=placement_fn
    )
    first_of_all = full_state(seeded(several.block(), seed=0))
    first_of_half = full_state(seeded(several.block(), seed=2 * (dist.get_rank() // 2)))
    for name, value in full_state(model).items():
        expected = first_of_half if "expert" in name else first_of_all
        assert_same(value, expected[name], bitwise=True, what=name)


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("kind", ["several", "replicas only"])
def test_ranks_compare_notes_on_every_mesh(kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_DEBUG", "1")
        if kind == "several":
            model = several.build()
            for name, param in model.named_parameters():
                if "expert" in name:
                    param.data.add_(dist.get_rank() // 2)  # no difference on their own mesh
            several.shard(model, "flat")
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = seeded(nn.Sequential(nn.Linear(5, 5)))
            meshard.fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))
        model(several.batch_of(0)).sum().backward()
        SGD(model.parameters()).step()
