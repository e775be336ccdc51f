"""Replicated parameters among sharded ones, against one process."""

from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import meshard
from meshard import GradientSync, ShardPlacementResult
from tests.support.ranks import on_ranks
from tests.support.replicated import Pair
from tests.support.sharding import shard_blocks
from tests.support.spread import slow, spread
from tests.support.threads import run_threads


def replicate_vectors(param):
    return Replicate() if param.dim() == 1 else None


def replicate_all(_):
    return Replicate()


def compare(shape, schedule="RF", placement_fn=replicate_vectors, prepare=None, **kwargs):
    mesh = init_device_mesh("cpu", shape)
    pair = Pair(make=lambda m: shard_blocks(m, mesh, shard_placement_fn=placement_fn, **kwargs))
    if prepare is not None:
        prepare(pair.ours)
    pair.ours.set_gradient_divide_factor(4.0)
    for number in range(3):
        pair.window(schedule, number)
        for param in pair.plain.parameters():
            param.grad /= 4  # not the loss: the model rounds in backward
        pair.compare()
        pair.update()


@spread(
    shape=[(2,), (3,), (2, 2)],
    schedule=["F", "RF", "NRF", "FF"],
    placement_fn=[replicate_vectors, replicate_vectors, replicate_all, replicate_all],
)
def test_gradients_among_shards_are_those_of_one_process(shape, schedule, placement_fn):
    run_threads(compare, torch.Size(shape).numel(), shape, schedule, placement_fn)


separate = methodcaller("set_separate_reduce_scatter_group")
allocate = methodcaller("set_allocate_memory_from_process_group_for_comm", True)


@on_ranks(4)
@pytest.mark.parametrize(
    ("placement_fn", "prepare", "kwargs"),
    [
        (replicate_vectors, separate, {}),
        slow(replicate_all, separate, {}),
        slow(replicate_vectors, None, {"reshard_after_forward": 2}),
        (replicate_all, None, {"reshard_after_forward": 2}),
        (replicate_all, allocate, {}),  # gloo could not for shards
    ],
)
def test_settings_of_shards_do_nothing_to_replicated_parameters(placement_fn, prepare, kwargs):
    compare((4,), "RF", placement_fn, prepare, **kwargs)


@on_ranks(2)
def test_they_are_replicated_beside_sharded_ones():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    layer = meshard.fully_shard(nn.Linear(5, 3), mesh, shard_placement_fn=replicate_vectors)
    assert layer.weight.placements == (Shard(0),)
    assert layer.bias.placements == (Replicate(),)
    assert layer.bias.to_local().shape == (3,)
    layer(torch.ones(2, 5)).sum().backward()
    # The average over two ranks of a gradient of 2, at the divide factor of all ranks.
    assert layer.bias.grad.placements == (Replicate(),)
    assert torch.equal(layer.bias.grad.to_local(), torch.full((3,), 2.0))
    assert "replicated on dp=2" in meshard.describe(layer)


@on_ranks(2)
def test_reducing_over_the_shards_only_leaves_them_pending():
    layer = meshard.fully_shard(nn.Linear(5, 3), shard_placement_fn=replicate_vectors)
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
def test_a_mesh_of_its_own_replicates_a_parameter():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    place = ShardPlacementResult(Replicate(), world["edp"])
    layer = meshard.fully_shard(
        nn.Linear(6, 4),
        init_device_mesh("cpu", (4,)),
        shard_placement_fn=lambda p: place if p.dim() == 1 else None,
    )
    layer.set_gradient_divide_factor(1.0)
    layer(torch.full((1, 6), 1.0)).sum().backward()
    assert torch.equal(layer.bias.grad.to_local(), torch.full((4,), 2.0))  # of its own two ranks
    assert layer.bias.device_mesh == world["edp"]
    norm = meshard.get_total_norm([param.grad for param in layer.parameters()])
    assert norm.item() == pytest.approx((24 * 4.0**2 + 4 * 2.0**2) ** 0.5, rel=1e-6)
