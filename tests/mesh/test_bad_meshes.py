"""Parameters that another parallelism has laid out where they do not fit."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import meshard
from tests.support import insides
from tests.support.fake import fake_group


@pytest.fixture(autouse=True)
def world():
    with fake_group(8):
        yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))


def layer_on(mesh, *placements):
    layer = nn.Linear(4, 4)
    placed = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)
    layer.weight = nn.Parameter(placed)
    return layer


def refused(text, layer, *args, **kwargs):
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=text):
        meshard.fully_shard(layer, *args, **kwargs)
    assert type(layer) is nn.Linear
    assert all(layer.get_parameter(name) is param for name, param in before.items())


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_a_placement_that_cannot_be_cut_again(world, placement):
    text = "'weight' is a DTensor already: it has placement .* on axis 0 .* redistribute it before"
    refused(text, layer_on(world["tp"], placement), world["dp"])


def test_a_mesh_of_another_root(world):
    text = r"'weight' is a DTensor already: .* cannot be joined; make one mesh with named axes"
    overlapping = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    refused(text, layer_on(overlapping["b"], Shard(0)), world["dp"])
    ranks = torch.arange(8).view(2, 4).t().contiguous()
    renumbered = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
    refused(text, layer_on(renumbered["b"], Shard(0)), world["dp"])


def test_a_mesh_of_another_root_with_the_same_ranks_is_accepted(world):
    other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))
    layer = meshard.fully_shard(layer_on(other["b"], Shard(0)), world["dp"])
    assert layer.weight.device_mesh.mesh_dim_names == ("dp", "b")


def test_a_mesh_without_names_or_root(world):
    text = r"'weight' is a DTensor already: .* cannot be joined; make one mesh with named axes"
    refused(text, layer_on(init_device_mesh("cpu", (8,)), Shard(0)), world["dp"])
    refused(text, layer_on(world["tp"], Shard(0)))  # over the default mesh


def test_the_data_parallel_mesh_itself(world):
    text = r"'weight' is a DTensor already: .* cannot be joined"
    refused(text, layer_on(world["dp"], Replicate()), world["dp"])


def test_a_mesh_on_another_device(world):
    other = DeviceMesh("meta", torch.arange(8).view(4, 2), mesh_dim_names=("dp", "tp"))
    layer = layer_on(world["tp"], Shard(0))
    refused("'weight' is a DTensor already: it lies over .* take both from", layer, other["dp"])


def gradient_of(placements, mesh):
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)


def test_a_gradient_that_is_cut_along_a_data_parallel_axis(world):
    layer = layer_on(world, Replicate(), Replicate())
    layer.bias = None
    dims = meshard.DataParallelMeshDims(shard="dp")
    meshard.fully_shard(layer, world, dp_mesh_dims=dims)
    param = insides.units(layer)[0].params[0]
    with pytest.raises(RuntimeError, match=r"'weight' has placements .* along data-parallel axes"):
        param.plain_gradient(gradient_of([Shard(0), Replicate()], world))
    with pytest.raises(RuntimeError, match=r"'weight' is a DTensor over .* came as a Tensor"):
        param.plain_gradient(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match=r"'weight' is a DTensor over .* came as a DTensor over"):
        param.plain_gradient(gradient_of([Shard(0)], world["tp"]))


def test_a_mesh_without_this_rank():
    elsewhere = DeviceMesh("cpu", [3, 5], _init_backend=False)
    refused(r"rank 0 is not in the mesh of ranks \[3, 5\]", nn.Linear(4, 4), elsewhere)
