"""Models that tensor parallelism has cut, against the whole model."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy
from tests.mesh.tensor_parallel import (
    ADAM,
    SGD,
    batches,
    build,
    cut,
    last_dim,
    loss_of,
    meshes,
    whole_batches,
)
from tests.support.parity import (
    assert_same,
    assert_same_run,
    full_grads,
    full_state,
    train,
    train_plain,
    whole,
)
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.threads import run_threads


def train_cut(kind, plan, steps, optimizer_fn, **kwargs):
    data, tp, data_rank = meshes(kind)
    model = shard_blocks(cut(build(), tp, plan), data, **kwargs)
    return train(
        model, batches(steps, data_rank), optimizer_fn, loss_fn=loss_of, reduce_loss="mean"
    )


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_two_by_two_ranks_train_like_one_process(run_ranks, plan):
    expected = train_plain(build(), whole_batches(4, 2), ADAM, loss_fn=loss_of)
    for run in run_ranks(train_cut, 4, "dp", plan, 4, ADAM, timeout=200):
        assert_same_run(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "placement_fn"),
    [
        ("tensor", None),
        ("sequence", last_dim),
    ],
)
def test_replicas_of_cut_and_sharded_models_train_like_one_process(plan, placement_fn):
    expected = train_plain(build(), whole_batches(3, 4), SGD, loss_fn=loss_of)
    runs = run_threads(train_cut, 8, "hsdp", plan, 3, SGD, shard_placement_fn=placement_fn)
    for run in runs:
        assert_same_run(run, expected)


def train_compiled():
    # What other tests compiled in this process makes torch try symbolic shapes here, and recurse.
    torch.compiler.reset()
    data, tp, data_rank = meshes("dp")
    model = cut(build(), tp, "tensor")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    shard_blocks(model, data)
    with warnings.catch_warnings():
        # torch 2.13 asks a DTensor that is no leaf for its gradient while it traces.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return train(model, batches(2, data_rank), SGD, loss_fn=loss_of, reduce_loss="mean")


@pytest.mark.slow
def test_compiled_blocks_may_be_cut(run_ranks):
    expected = train_plain(build(), whole_batches(2, 2), SGD, loss_fn=loss_of)
    for run in run_ranks(train_compiled, 4, timeout=300):
        assert_same_run(run, expected)


def train_on_neighbours():
    world = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = shard_blocks(cut(build(), world["tp"], "tensor"), world["dp"], reshard_after_forward=2)
    with CommLedger(model) as ledger:
        mine = batches(2, world["dp"].get_local_rank())
        run = train(model, mine, SGD, loss_fn=loss_of, reduce_loss="mean")
    assert {event.group_size for event in ledger.events if event.op == "all_gather"} == {2, 4}
    return run


@pytest.mark.slow
def test_neighbours_are_those_of_the_same_part():
    """Each part of tensor parallelism has neighbours of its own."""
    expected = train_plain(build(), whole_batches(2, 4), SGD, loss_fn=loss_of)
    for run in run_threads(train_on_neighbours, 8):
        assert_same_run(run, expected)


@on_threads(8)
def test_parameters_lie_over_all_axes_at_rest_and_over_those_of_tensor_parallelism_in_use():
    data, tp, _ = meshes("hsdp")
    model = shard_blocks(cut(build(), tp, "sequence"), data)
    block = model.blocks[0]
    names = ("replicate", "shard", "tp")
    at_rest = {name: param.placements for name, param in block.named_parameters()}
    assert at_rest == {
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
    seen = {}

    def look(module, args):
        weight = module.weight
        seen["mesh"], seen["placements"] = weight.device_mesh, weight.placements
        seen["shape"] = weight.shape

    block.up.register_forward_pre_hook(look)
    model(batches(1, 0)[0])
    assert seen == {"mesh": tp, "placements": (Shard(0),), "shape": (7, 6)}
    assert isinstance(block.up.weight, DTensor) and block.up.weight.device_mesh.ndim == 3
    assert_same(full_state(model), full_state(build()), bitwise=True)


SCHEDULES = [
    [GradientSync.NONE, GradientSync.NONE, GradientSync.FULL],
    [GradientSync.REDUCE_SCATTER, GradientSync.REDUCE_SCATTER, GradientSync.FULL],
    [GradientSync.FULL, GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL],
]


def accumulate(plan, schedule):
    data, tp, data_rank = meshes("hsdp")
    model = shard_blocks(cut(build(), tp, plan), data)
    for mode, batch in zip(schedule, batches(len(schedule), data_rank), strict=True):
        model.set_gradient_sync(mode)
        loss_of(model(batch)).backward()
        pending = meshard.pending_gradients(model)
        if mode is GradientSync.REDUCE_SCATTER:
            partial = pending["blocks.0.up.weight"]
            assert partial.placements[0] == Partial("avg") and partial.shape == (7, 6)
            whole(partial)  # may be asked for
    return full_grads(model)


def accumulate_plain(num_batches):
    model = build()
    for batch in whole_batches(num_batches, 4):
        loss_of(model(batch)).backward()
    return full_grads(model)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_every_schedule_of_microbatches_gives_the_gradient_of_all(plan, schedule):
    expected = accumulate_plain(len(schedule))
    for grads in run_threads(accumulate, 8, plan, schedule):
        assert_same(grads, expected)


@on_ranks(4)
def test_norms_over_cut_sharded_and_plain_parameters_are_those_of_the_whole():
    data, tp, _ = meshes("dp")
    model, plain = build(), build()
    cut(model, tp, "sequence")
    shard_blocks(model, data, ignored_params={model.outlet.weight})
    batch = batches(1, 0)[0]  # the same everywhere, for the parameter that nobody reduces
    loss_of(model(batch)).backward()
    loss_of(plain(batch)).backward()
    for norm_type in (1, 2.0, math.inf):
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        with CommLedger() as ledger:
            found = meshard.get_total_norm([p.grad for p in model.parameters()], norm_type)
        torch.testing.assert_close(found, expected)
        if dist.get_backend() != "threaded":  # there, a ledger sees all ranks
            assert ledger.counts == {"all_gather": 2}  # of dp, and of tp
    meshard.clip_grad_norm_(model, 0.01)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_same(full_grads(model), full_grads(plain))


def train_in_bfloat16():
    data, tp, data_rank = meshes("dp")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_blocks(cut(build(), tp, "tensor"), data, mp_policy=policy)
    mine = batches(3, data_rank)
    run = train(model, mine, SGD, loss_fn=lambda y: loss_of(y.float()), reduce_loss="mean")
    assert all(param.dtype == torch.float32 for param in model.parameters())
    return run


@pytest.mark.slow
def test_mixed_precision_computes_in_the_narrow_dtype_and_keeps_the_wide_one():
    expected = train_plain(build(), whole_batches(3, 2), SGD, loss_fn=loss_of)
    for run in run_threads(train_in_bfloat16, 4):
        assert_same_run(run, expected, torch.bfloat16)


def save(path, kind):
    model = model_on(kind)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)


def load(path, kind):
    model = model_on(kind)
    for param in model.parameters():
        nn.init.zeros_(param)
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    assert_same(full_state(model), full_state(build()), bitwise=True)
    assert_same(loss_of(model(batches(1, 0)[0])), loss_of(build()(batches(1, 0)[0])))


def model_on(kind):
    if kind == "flat":
        return shard_blocks(build(), init_device_mesh("cpu", (4,)))
    data, tp, _ = meshes("dp")
    return shard_blocks(cut(build(), tp, "tensor"), data)


@pytest.mark.extras
@pytest.mark.parametrize(("saved", "loaded"), [("cut", "flat"), ("flat", "cut")])
def test_a_checkpoint_comes_back_on_another_mesh(run_ranks, tmp_path, saved, loaded):
    run_ranks(save, 4, str(tmp_path), saved)
    run_ranks(load, 4, str(tmp_path), loaded)
