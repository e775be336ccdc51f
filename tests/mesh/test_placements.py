"""Placements: each parameter may choose its dim."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Partial, Shard

import meshard
from meshard import ShardPlacementResult
from tests.support.fake import fake_group
from tests.support.models import UnevenMlp, seeded
from tests.support.parity import (
    assert_same,
    assert_same_run,
    full_grads,
    train,
    train_plain,
)
from tests.support.spread import spread
from tests.support.threads import run_threads

SGD = functools.partial(torch.optim.SGD, lr=0.1)
STEPS = 3


def last_dim(param):
    return Shard(param.dim() - 1)


def alternating(param):
    return Shard(param.shape[0] % param.dim())


# --- any dim, even or not -------------------------------------------------------------------


def loss_of(output):
    return (output + 0.5).square().mean()


def batch_of(step, rank, width=7):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator)


def train_uneven(placement_fn, mesh_shape, reshard_after_forward, shard=meshard.fully_shard):
    model = seeded(UnevenMlp())
    mesh = init_device_mesh("cpu", mesh_shape)
    for module in (*model.layers, model):
        shard(
            module,
            mesh=mesh,
            shard_placement_fn=placement_fn,
            reshard_after_forward=reshard_after_forward,
        )
    mine = [batch_of(step, dist.get_rank()) for step in range(STEPS)]
    return train(model, mine, SGD, loss_fn=loss_of, reduce_loss="mean")


@spread(
    reshard_after_forward=[True, False, 2],
    placement_fn=[last_dim, alternating],
    mesh_shape=[(4,), (2, 4)],
)
def test_dims_that_nothing_divides_train_like_one_process(
    placement_fn, mesh_shape, reshard_after_forward
):
    num_ranks = 4 if len(mesh_shape) == 1 else 8
    batches = [torch.cat([batch_of(s, r) for r in range(num_ranks)]) for s in range(STEPS)]
    expected = train_plain(seeded(UnevenMlp()), batches, SGD, loss_fn=loss_of)
    runs = run_threads(train_uneven, num_ranks, placement_fn, mesh_shape, reshard_after_forward)
    for run in runs:
        assert_same_run(run, expected)


def test_torch_shards_dim_1_evenly_only():
    """Measured on torch 2.13 and 2.15: refused where the ranks do not divide the dim."""
    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,))
        meshard.fully_shard(nn.Linear(7, 8), mesh, shard_placement_fn=last_dim)
        with pytest.raises(NotImplementedError, match="uneven sharding"):
            torch_fully_shard(nn.Linear(7, 8), mesh=mesh, shard_placement_fn=last_dim)


def forward_backward_of_dim_1(shard):
    layer = seeded(nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    net = nn.Sequential(layer)
    for module in (layer, net):
        shard(module, mesh=mesh, shard_placement_fn=last_dim, reshard_after_forward=2)
    net(batch_of(0, 0, width=8)).square().sum().backward()
    return full_grads(net)


def test_torch_keeps_no_neighbours_of_dim_1(run_ranks):
    """Measured on torch 2.13 and 2.15: an int for reshard_after_forward fails in backward."""
    plain = nn.Sequential(seeded(nn.Linear(8, 8)))
    plain(batch_of(0, 0, width=8)).square().sum().backward()
    for grads in run_ranks(forward_backward_of_dim_1, 4, meshard.fully_shard, timeout=200):
        assert_same(grads, full_grads(plain))
    with pytest.raises(Exception, match=r"rank \d of 4"):
        run_ranks(forward_backward_of_dim_1, 4, torch_fully_shard)


# --- what is refused


@pytest.fixture
def world():
    with fake_group(8):
        yield init_device_mesh("cpu", (8,))


def refused(text, result_of):
    layer = nn.Linear(4, 4)
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=text):
        meshard.fully_shard(layer, shard_placement_fn=result_of)
    assert type(layer) is nn.Linear
    assert all(layer.get_parameter(name) is param for name, param in before.items())


def test_a_mesh_of_three_axes_is_refused(world):
    mesh = init_device_mesh("cpu", (2, 2, 2))
    text = r"shard_placement_fn for parameter 'weight': fully_shard needs a 1D mesh"
    refused(text, lambda _: ShardPlacementResult(Shard(0), mesh))


def test_a_mesh_on_another_device_is_refused(world):
    mesh = DeviceMesh("meta", torch.arange(8))
    text = r"shard_placement_fn returned .* for parameter 'weight', .* meshes of one device type"
    refused(text, lambda _: ShardPlacementResult(Shard(0), mesh))


@pytest.mark.parametrize("result", [Partial(), 1, (Shard(0), None)])
def test_other_results_are_refused(world, result):
    text = re.escape(f"shard_placement_fn returned {result!r} for parameter 'weight'; return")
    refused(text, lambda _: result)
    if isinstance(result, Partial):  # others are refused by ShardPlacementResult itself
        refused("shard_placement_fn returned", lambda _: ShardPlacementResult(result, world))


def test_a_dim_that_is_not_there_is_refused(world):
    text = "for parameter 'weight', which has only 2 dims"
    refused(text, lambda _: ShardPlacementResult(Shard(2), world))


def test_an_int_must_divide_the_ranks_of_every_mesh():
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ep", "edp"))
        layer = nn.Linear(4, 4)

        def placement_fn(param):
            return ShardPlacementResult(Shard(0), mesh["ep"]) if param is layer.bias else None

        with pytest.raises(ValueError, match=r"reshard_after_forward=4 must divide the 2 ranks"):
            meshard.fully_shard(layer, reshard_after_forward=4, shard_placement_fn=placement_fn)
        assert type(layer) is nn.Linear
