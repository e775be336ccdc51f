"""Replicated parameters among sharded ones, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import meshard
from meshard import CommLedger, GradientSync, ShardPlacementResult
from tests.support.integer_model import (
    LEARNING_RATE,
    IntegerModel,
    integer_batch,
    integer_loss,
)
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.threads import run_threads

MODES = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}
STEPS = 3


def keep_vectors_whole(param):
    return Replicate() if param.dim() == 1 else None


def keep_all_whole(_):
    return Replicate()


def plain_run(ranks, schedule, factor):
    model = IntegerModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        for number in range(len(schedule)):
            for rank in range(ranks):
                integer_loss(model(integer_batch(10 * step + number, rank))).backward()
        for param in model.parameters():
            param.grad /= factor  # not the loss: the model rounds in backward
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    return grads, full_state(model)


def compare(shape, schedule="RF", placement_fn=keep_vectors_whole, prepare=None, **kwargs):
    model = shard_blocks(
        IntegerModel(), init_device_mesh("cpu", shape), shard_placement_fn=placement_fn, **kwargs
    )
    if prepare is not None:
        prepare(model)
    model.set_gradient_divide_factor(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        for number, mode in enumerate(schedule):
            model.set_gradient_sync(MODES[mode])
            integer_loss(model(integer_batch(10 * step + number, dist.get_rank()))).backward()
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    expected = plain_run(dist.get_world_size(), schedule, 4.0)
    assert_same(grads, expected[0], bitwise=True, what="gradient")
    assert_same(full_state(model), expected[1], bitwise=True)


@spread(
    shape=[(2,), (3,), (2, 2)],
    schedule=["F", "RF", "NRF", "FF"],
    placement_fn=[keep_vectors_whole, keep_vectors_whole, keep_all_whole, keep_all_whole],
)
def test_whole_parameters_among_shards(shape, schedule, placement_fn):
    run_threads(compare, torch.Size(shape).numel(), shape, schedule, placement_fn)


def separate(model):
    model.set_separate_reduce_scatter_group()


def allocate_from_groups(model):
    model.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(4)
@pytest.mark.parametrize(
    ("placement_fn", "prepare", "kwargs"),
    [
        (keep_vectors_whole, separate, {}),
        (keep_all_whole, separate, {}),
        (keep_vectors_whole, None, {"reshard_after_forward": 2}),
        (keep_all_whole, None, {"reshard_after_forward": 2}),
        (keep_all_whole, allocate_from_groups, {}),  # gloo could not for shards
    ],
)
def test_settings_of_shards_do_nothing_to_them(placement_fn, prepare, kwargs):
    compare((4,), "RF", placement_fn, prepare, **kwargs)


@on_ranks(2)
def test_only_an_all_reduce_is_issued_for_them():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    layer = nn.Linear(5, 3)
    whole_bytes = 3 * 4
    meshard.fully_shard(layer, mesh, shard_placement_fn=keep_vectors_whole)
    assert layer.weight.placements == (Shard(0),)
    assert layer.bias.placements == (Replicate(),)
    assert layer.bias.to_local().shape == (3,)
    with CommLedger(layer) as ledger:
        layer(torch.ones(2, 5)).sum().backward()
    told = [(event.op, event.unit, event.payload_bytes) for event in ledger.events]
    # The average over two ranks of a gradient of 2, at the divide factor of all ranks.
    assert layer.bias.grad.placements == (Replicate(),)
    assert torch.equal(layer.bias.grad.to_local(), torch.full((3,), 2.0))
    assert [op for op, unit, _ in told if "replicated" in unit] == ["all_reduce"]
    assert [size for _, unit, size in told if "replicated" in unit] == [whole_bytes]
    assert "replicated on dp=2" in meshard.describe(layer)


@on_ranks(2)
def test_reducing_over_the_shards_only_leaves_them_pending():
    layer = meshard.fully_shard(nn.Linear(5, 3), shard_placement_fn=keep_vectors_whole)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.set_gradient_sync(GradientSync.REDUCE_SCATTER)
    layer(torch.ones(2, 5)).sum().backward()
    assert layer.bias.grad is None
    with pytest.raises(RuntimeError, match="not reduced across the replicas yet"):
        optimizer.step()
    meshard.finalize_gradients(layer)
    optimizer.step()
    bias = layer.bias.full_tensor()
    of_first = bias.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(bias, of_first)


@on_ranks(4)
def test_whole_on_a_mesh_of_its_own():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    mesh = init_device_mesh("cpu", (4,))
    layer = nn.Linear(6, 4)
    meshard.fully_shard(
        layer,
        mesh,
        shard_placement_fn=lambda p: (
            ShardPlacementResult(Replicate(), world["edp"]) if p.dim() == 1 else None
        ),
    )
    layer.set_gradient_divide_factor(1.0)
    layer(torch.full((1, 6), 1.0)).sum().backward()
    assert torch.equal(layer.bias.grad.to_local(), torch.full((4,), 2.0))  # of its own two ranks
    assert layer.bias.device_mesh == world["edp"]
    norm = meshard.get_total_norm([param.grad for param in layer.parameters()])
    assert norm.item() == pytest.approx((24 * 4.0**2 + 4 * 2.0**2) ** 0.5, rel=1e-6)
