"""Models that tensor parallelism has cut, against the whole model."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.mesh.tensor_parallel import batch_of, build, cut, meshes
from tests.support.against_plain import check_gradients, check_training
from tests.support.models import Made
from tests.support.parity import assert_same, full_grads, full_state, whole
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import slow, spread

NONE, SCATTER, FULL = GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL


def sharded(kind="dp", plan="tensor", **kwargs):
    data, tp = meshes(kind)
    return shard_blocks(cut(build(), tp, plan), data, **kwargs)


def loss_of(model, rank, number=0):
    return (model(batch_of(rank, number)).float() + 0.5).square().mean()


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("plan", [slow("tensor"), "sequence"])
def test_two_by_two_ranks_train_like_one_process(plan):
    check_training(sharded(plan=plan), build(), loss_of)


@pytest.mark.slow
@on_threads(8)
@pytest.mark.parametrize(
    ("kind", "plan", "kwargs"),
    [
        ("hsdp", "tensor", {}),
        ("hsdp", "sequence", {"shard_placement_fn": lambda param: Shard(param.dim() - 1)}),
        # Each part of tensor parallelism has neighbours of its own.
        ("dp", "tensor", {"reshard_after_forward": 2}),
    ],
)
def test_layouts_of_cut_models_train_like_one_process(kind, plan, kwargs):
    model = sharded(kind, plan, **kwargs)
    ledger = check_training(model, build(), loss_of)
    gathered = {event.group_size for event in ledger.events if event.op == "all_gather"}
    assert gathered == ({2} if kind == "hsdp" else {2, 4})


@pytest.mark.slow
@on_threads(4)
def test_mixed_precision_computes_in_the_narrow_dtype_and_keeps_the_wide_one():
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    check_training(model, build(), loss_of, dtype=torch.bfloat16)
    assert all(param.dtype == torch.float32 for param in model.parameters())


@pytest.mark.slow
@on_ranks(4, timeout=300)
def test_compiled_blocks_may_be_cut():
    # What other tests compiled in this process makes torch try symbolic shapes here, and recurse.
    torch.compiler.reset()
    data, tp = meshes("dp")
    model = cut(build(), tp, "tensor")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with warnings.catch_warnings():
        # torch 2.13 asks a DTensor that is no leaf for its gradient while it traces.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        check_training(shard_blocks(model, data), build(), loss_of, steps=2)


@on_threads(8)
def test_parameters_lie_over_all_axes_at_rest_and_over_those_of_tensor_parallelism_in_use():
    model = sharded("hsdp", "sequence")
    block = model.blocks[0]
    names = ("replicate", "shard", "tp")
    assert {name: param.placements for name, param in block.named_parameters()} == {
        "norm.weight": (Replicate(), Shard(0), Replicate()),
        "norm.bias": (Replicate(), Shard(0), Replicate()),
        "up.weight": (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
        "up.bias": (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (Replicate(), Shard(0), Shard(1)),
        "down.bias": (Replicate(), Shard(0), Replicate()),
    }
    for param in block.parameters():
        assert param.device_mesh.mesh_dim_names == names
    assert model.inlet.weight.device_mesh.mesh_dim_names == names[:2]
    seen = []
    block.up.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(batch_of(0))
    assert (seen[0].device_mesh.mesh_dim_names, seen[0].placements) == (("tp",), (Shard(0),))
    assert seen[0].shape == (7, 6)
    assert isinstance(block.up.weight, DTensor) and block.up.weight.device_mesh.ndim == 3
    assert_same(full_state(model), full_state(build()), bitwise=True)


@pytest.mark.slow
@on_threads(8)
@spread(
    schedule=[[NONE, NONE, FULL], [SCATTER, SCATTER, FULL], [FULL, NONE, SCATTER, FULL]],
    plan=["tensor", "sequence"],
)
def test_every_schedule_of_microbatches_gives_the_gradient_of_all(plan, schedule):
    model = sharded("hsdp", plan)

    def window(each, rank):
        for number, mode in enumerate(schedule):
            if each is model:
                model.set_gradient_sync(mode)
            loss_of(each, rank, number).backward()
            if each is model and mode is SCATTER:
                partial = meshard.pending_gradients(model)["blocks.0.up.weight"]
                assert partial.placements[0] == Partial("avg") and partial.shape == (7, 6)
                whole(partial)  # may be asked for

    check_gradients(model, build(), window)


@on_ranks(4)
def test_norms_over_cut_sharded_and_plain_parameters_are_those_of_the_whole():
    (data, tp), plain = meshes("dp"), build()
    model = cut(build(), tp, "sequence")
    shard_blocks(model, data, ignored_params={model.outlet.weight})
    for each in (model, plain):
        loss_of(each, 0).backward()  # the same everywhere, for the parameter that nobody reduces
    for norm_type in (1, 2.0, math.inf):
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        found = meshard.get_total_norm([p.grad for p in model.parameters()], norm_type)
        torch.testing.assert_close(found, expected)
    meshard.clip_grad_norm_(model, 0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.extras
@on_ranks(4)
def test_a_checkpoint_of_torch_comes_back_on_another_mesh(tmp_path):
    models = [sharded(), shard_blocks(build(), init_device_mesh("cpu", (4,)))]
    for number, (saved, loaded) in enumerate([models, models[::-1]]):
        checkpoint.save(saved.state_dict(), checkpoint_id=str(tmp_path / str(number)))
        for param in loaded.parameters():
            nn.init.zeros_(param)
        state = loaded.state_dict()
        checkpoint.load(state, checkpoint_id=str(tmp_path / str(number)))
        loaded.load_state_dict(state)
        assert_same(full_state(loaded), full_state(build()), bitwise=True)
        assert_same(loss_of(loaded, 0), loss_of(build(), 0))


@on_threads(8)
@spread(
    shape=[(8, 4), (7, 3), (3, 5), (1, 1)],
    placements=[(Shard(0), Shard(1)), (Shard(0), Shard(0))],
    shard_dim=[0, 1],
)
def test_two_axes_may_have_cut_a_parameter_before(shape, placements, shard_dim):
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    weight = nn.Parameter(distribute_tensor(values, world["cp", "tp"], placements))
    model = Made(lambda m, x: m.weight.to_local() * x, weight=weight)
    meshard.fully_shard(model, world["dp"], shard_placement_fn=lambda _: Shard(shard_dim))
    assert torch.equal(whole(model.weight), values)
    model(1.0 + world["dp"].get_local_rank()).sum().backward()
    assert torch.equal(whole(model.weight.grad), torch.full(shape, 1.5))
