"""The mesh that units get where none is passed."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from meshard.api import default_mesh


@pytest.fixture
def start_world():
    def start():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    yield start
    dist.destroy_process_group()


def test_one_rank_without_a_group_or_a_mesh_is_enough(start_world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for layer in (*model, model):
        meshard.fully_shard(layer)
    assert dist.get_world_size() == 1
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad.full_tensor().shape == (4, 4)


def test_a_new_world_gets_a_new_mesh_while_the_old_one_is_alive(start_world):
    start_world()
    old_model = meshard.fully_shard(nn.Linear(2, 2))
    old_mesh, old_world = default_mesh(), dist.group.WORLD
    assert old_model.weight.device_mesh is old_mesh
    dist.destroy_process_group()

    start_world()
    assert dist.group.WORLD is not old_world
    model = meshard.fully_shard(nn.Linear(2, 2))
    assert model.weight.device_mesh is default_mesh() is not old_mesh
    model(torch.ones(1, 2)).sum().backward()


def test_a_group_that_was_destroyed_is_freed_with_the_model(start_world):
    """It has threads and sockets."""
    start_world()
    model = meshard.fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    world = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    del model
    gc.collect()
    assert world() is None
    start_world()
