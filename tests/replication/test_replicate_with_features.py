"""Replicated modules with other features: meshes, sharding, tools, optimizers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.replicated import SMALL, Pair, run
from tests.support.spread import spread


@on_ranks(4)
def test_all_axes_of_a_mesh_replicate():
    pair = Pair(mesh=init_device_mesh("cpu", (2, 2)))
    pair.steps(range(4))
    pair.backward(4)
    pair.assert_views()


def without_a_group():
    pair = Pair()
    pair.steps(range(4))
    for number in (5, 6):
        with pair.ours.no_sync():
            pair.backward(number)
        pair.backward(number + 2)
        pair.compare()
    pair.assert_views()
    with CommLedger() as ledger:
        pair.backward(9)
    assert ledger.counts == {}


def test_one_rank_needs_no_process_group():
    try:
        without_a_group()
    finally:
        dist.destroy_process_group()


@on_ranks(4)
def test_a_part_of_a_mesh():
    """A sub-mesh replicates; the other axis holds other models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    model = IntegerModel(seed=mesh["model"].get_local_rank())
    plain = IntegerModel(seed=mesh["model"].get_local_rank())
    meshard.replicate(model, mesh["data"], bucket_cap_mb=SMALL).set_gradient_divide_factor(1.0)
    for number in range(3):
        run(model, integer_batch(number, mesh["data"].get_local_rank()))
        for rank in range(2):
            run(plain, integer_batch(number, rank))
        assert_same(full_grads(model), full_grads(plain), bitwise=True)


def sharded_inside(shape, schedule):
    """Units of fully_shard inside a replicated module shard their own parameters."""
    mesh = init_device_mesh("cpu", shape)
    model, plain = IntegerModel(), IntegerModel()
    for block in model.blocks[:2]:
        meshard.fully_shard(block, mesh)
    meshard.replicate(model, bucket_cap_mb=SMALL)
    model.set_gradient_divide_factor(1.0)
    compare_windows(model, plain, schedule)
    run(model, integer_batch(0, 0))
    assert type(model.shift.grad) is torch.Tensor
    assert type(model.blocks[0].linear.bias.grad) is not torch.Tensor


def replicated_inside(shape, schedule):
    """A replicated module inside a sharded root keeps its parameters whole."""
    mesh = init_device_mesh("cpu", shape)
    model, plain = IntegerModel(), IntegerModel()
    meshard.replicate(model.blocks[0], bucket_cap_mb=2e-5)
    meshard.replicate(model.blocks[2])
    meshard.fully_shard(model.blocks[1], mesh)
    meshard.fully_shard(model, mesh)
    model.set_gradient_divide_factor(1.0)
    compare_windows(model, plain, schedule)
    run(model, integer_batch(0, 0))
    assert type(model.blocks[0].linear.weight.grad) is torch.Tensor


MODES = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}


def compare_windows(model, plain, schedule):
    optimizers = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in (model, plain)]
    for window in range(4):
        for number, letter in enumerate(schedule):
            model.set_gradient_sync(MODES[letter])
            run(model, integer_batch(10 * window + number, dist.get_rank()))
            for rank in range(dist.get_world_size()):
                run(plain, integer_batch(10 * window + number, rank))
        assert_same(full_grads(model), full_grads(plain), bitwise=True)
        ours = meshard.clip_grad_norm_(model, 1e6)
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1e6)
        torch.testing.assert_close(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(plain), bitwise=True)
        with torch.no_grad():
            x = integer_batch(99, 0)
            assert torch.equal(model(x), plain(x))


@spread(
    shape=[(2,), (2, 2), (2, 2), (2,)],
    how=[sharded_inside, replicated_inside],
    schedule=["F", "NRF", "RFF"],
)
def test_beside_sharded_units(run_ranks, how, shape, schedule):
    run_ranks(how, torch.Size(shape).numel(), shape, schedule)


def debugged():
    pair = Pair()
    pair.steps(range(3))
    with pair.ours.no_sync():
        pair.backward(3)
    pair.backward(4)
    pair.compare()


def test_under_debug(run_ranks, monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    run_ranks(debugged, 2)


def described():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    meshard.replicate(model, bucket_cap_mb=6e-5)
    return meshard.describe(model)


def test_describe_shows_buckets(run_ranks):
    first, second = run_ranks(described, 2)
    assert first == second
    lines = [" ".join(line.split()) for line in first.splitlines()]
    assert lines[:4] == [
        "unit parameters dtype unsharded per rank padding mesh policies",
        "(root) bucket 1 16 float32 64 B 64 B 0 B replicate 2 x shard 1",
        "(root) bucket 0 8 float32 32 B 32 B 0 B replicate 2 x shard 1",
        "total 24 96 B 96 B 0 B",
    ]


@on_ranks(2)
def test_an_optimizer_may_go_to_backward_later():
    """An optimizer that is put in backward after buckets were made anew, and taken out again."""
    ours, theirs = IntegerModel(), IntegerModel()
    for model in (ours, theirs):
        meshard.replicate(model, bucket_cap_mb=SMALL)
    plain = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in (ours, theirs)]

    def step(number, optimizers):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            run(model, integer_batch(number, dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(ours), full_state(theirs), bitwise=True)

    for number in range(3):
        step(number, plain)
    optimizer = meshard.overlap_optimizer(ours, torch.optim.SGD, lr=LEARNING_RATE)
    for number in range(3, 6):
        step(number, (optimizer, plain[1]))
    optimizer.detach()
    for number in range(6, 8):
        step(number, (optimizer, plain[1]))


@on_ranks(1)
def test_what_cannot_be_replicated_is_said():
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        meshard.replicate([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="'weight' is on meta, but the mesh is on cpu"):
        meshard.replicate(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="complex parameters are not supported"):
        meshard.replicate(nn.Linear(2, 2, dtype=torch.complex64))
    layer = meshard.replicate(nn.Linear(2, 2))
    for apply in (meshard.replicate, meshard.fully_shard):
        with pytest.raises(ValueError, match=r"sharded or replicated already|is replicated; apply"):
            apply(layer)
    with pytest.raises(ValueError, match="sharded or replicated already"):
        meshard.replicate(meshard.fully_shard(nn.Linear(2, 2)))
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
            meshard.replicate(nn.Linear(2, 2), bucket_cap_mb=wrong)
    with pytest.raises(TypeError, match="bucket_cap_mb must be a number"):
        meshard.replicate(nn.Linear(2, 2), bucket_cap_mb="25")
    with pytest.raises(TypeError, match="gradient_as_bucket_view must be a bool"):
        meshard.replicate(nn.Linear(2, 2), gradient_as_bucket_view=1)
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        meshard.offload(layer)
    unpickled = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        meshard.replicate(unpickled, bucket_cap_mb=0)
    assert type(unpickled) is nn.Linear  # left as it was
    mesh = init_device_mesh("cpu", (1, 1, 1))
    with pytest.raises(ValueError, match="replicate needs a mesh of one or two axes"):
        meshard.replicate(unpickled, mesh)
