"""Meshes, axes and placements that are refused; the module stays as it was."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import meshard
from meshard import DataParallelMeshDims, ShardPlacementResult
from tests.support import insides
from tests.support.ranks import fake_group


@pytest.fixture(autouse=True)
def world():
    with fake_group(8):
        yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))


def layer_on(mesh, *placements, name="weight"):
    layer = nn.Linear(4, 4)
    local = torch.ones((4, 4) if name == "weight" else 4)
    placed = DTensor.from_local(local, mesh, placements, run_check=False)
    setattr(layer, name, nn.Parameter(placed))
    return layer


def refused(text, layer, *args, **kwargs):
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=text):
        meshard.fully_shard(layer, *args, **kwargs)
    assert type(layer) is nn.Linear
    assert all(layer.get_parameter(name) is param for name, param in before.items())


def test_ranks_that_do_not_ascend_along_the_shard_axis(world):
    text = r"the ranks of mesh .* do not ascend along shard axis {}; make the mesh with ascending"
    ranks = torch.arange(8).flip(0)
    refused(text.format(0), nn.Linear(4, 4), DeviceMesh("cpu", ranks))
    refused(text.format(1), nn.Linear(4, 4), DeviceMesh("cpu", ranks.view(2, 4)))
    mesh = DeviceMesh("cpu", ranks.view(2, 2, 2), mesh_dim_names=("a", "b", "tp"))
    dims = DataParallelMeshDims(shard=("a", "b"))
    refused(text.format(0), nn.Linear(4, 4), mesh, dp_mesh_dims=dims)
    replicas = ranks.view(2, 4).flip(1)  # only replicas do not ascend
    meshard.fully_shard(nn.Linear(4, 4), DeviceMesh("cpu", replicas))


# --- parameters that another parallelism has laid out where they do not fit ----------------


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_a_placement_that_cannot_be_cut_again(world, placement):
    text = "'weight' is a DTensor already: it has placement .* on axis 0 .* redistribute it before"
    refused(text, layer_on(world["tp"], placement), world["dp"])


def test_meshes_that_cannot_be_joined(world):
    overlapping = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    ranks = torch.arange(8).view(2, 4).t().contiguous()
    renumbered = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
    nameless = init_device_mesh("cpu", (8,))
    text = r"'weight' is a DTensor already: .* cannot be joined; make one mesh with named axes"
    for mesh in (overlapping["b"], renumbered["b"], nameless):
        refused(text, layer_on(mesh, Shard(0)), world["dp"])
    refused(text, layer_on(world["tp"], Shard(0)))  # over the default mesh
    refused(
        "'weight' is a DTensor already: .* cannot", layer_on(world["dp"], Replicate()), world["dp"]
    )


def test_a_mesh_of_another_root_with_the_same_ranks_is_accepted(world):
    other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))
    layer = meshard.fully_shard(layer_on(other["b"], Shard(0)), world["dp"])
    assert layer.weight.device_mesh.mesh_dim_names == ("dp", "b")


def test_a_mesh_on_another_device(world):
    other = DeviceMesh("meta", torch.arange(8).view(4, 2), mesh_dim_names=("dp", "tp"))
    layer = layer_on(world["tp"], Shard(0))
    refused("'weight' is a DTensor already: it lies over .* take both from", layer, other["dp"])


def test_gradients_that_do_not_fit_their_parameter(world):
    layer = layer_on(world, Replicate(), Replicate())
    layer.bias = None
    meshard.fully_shard(layer, world, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    param = insides.units(layer)[0].params[0]
    other = layer_on(world["tp"], Shard(0)).weight
    for gradient, text in (
        (
            distribute_tensor(torch.ones(4, 4), world, [Shard(0), Replicate()]),
            "has placements .* along data-parallel axes",
        ),
        (torch.ones(4, 4), "is a DTensor over .* came as a Tensor"),
        (other, "is a DTensor over .* came as a DTensor over"),
    ):
        with pytest.raises(RuntimeError, match=f"'weight' {text}"):
            param.plain_gradient(gradient)


def test_a_mesh_without_this_rank(world):
    elsewhere = DeviceMesh("cpu", [3, 5], _init_backend=False)
    refused(r"rank 0 is not in the mesh of ranks \[3, 5\]", nn.Linear(4, 4), elsewhere)


# --- named axes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"replicate": ()}, {"shard": "dp", "replicate": "dp"}])
def test_wrong_names_when_they_are_given(kwargs):
    with pytest.raises(ValueError, match="must name one axis or more, and none of them twice"):
        DataParallelMeshDims(**kwargs)


def test_axes_that_do_not_fit_the_mesh(world):
    layer, shard = nn.Linear(4, 4), DataParallelMeshDims(shard="dp")
    text = r"names the axis 'ep', but .* has \('dp', 'tp'\)"
    refused(text, layer, world, dp_mesh_dims=DataParallelMeshDims(shard="ep"))
    swapped = DataParallelMeshDims(shard=("tp", "dp"))
    refused("in another order; name them in the order", layer, world, dp_mesh_dims=swapped)
    nameless = init_device_mesh("cpu", (4, 2))
    refused("has no names; pass mesh_dim_names", layer, nameless, dp_mesh_dims=shard)
    refused("has no names; pass mesh_dim_names", layer, dp_mesh_dims=shard)


def test_parameters_that_do_not_fit_the_axes(world):
    shard = DataParallelMeshDims(shard="dp")
    layer = layer_on(world, Replicate(), Replicate())
    layer.bias = layer_on(world, Shard(0), Replicate(), name="bias").bias
    text = r"'bias' is a DTensor already: it has placement .* on the data-parallel axis 'dp'"
    refused(text, layer, world, dp_mesh_dims=shard)
    text = "'weight' is a DTensor already: .* must lie over the mesh that was passed"
    refused(text, layer_on(world["tp"], Shard(0)), world, dp_mesh_dims=shard)


# --- results of shard_placement_fn ---------------------------------------------------------


def test_results_that_do_not_fit(world):
    three = init_device_mesh("cpu", (2, 2, 2))
    meta = DeviceMesh("meta", torch.arange(8))
    on = ShardPlacementResult
    for given, text in (
        ((Shard(0), None), "shard_placement_fn returned .* for parameter 'weight'; return"),
        (on(Partial(), world["dp"]), "shard_placement_fn returned"),
        (on(Shard(2), world["dp"]), "for parameter 'weight', which has only 2 dims"),
        (on(Shard(0), three), "for parameter 'weight': fully_shard needs a 1D mesh"),
        (on(Shard(0), meta), "returned .* for parameter 'weight', .* meshes of one device type"),
    ):
        refused(text, nn.Linear(4, 4), shard_placement_fn=lambda _, given=given: given)


def test_an_int_must_divide_the_ranks_of_every_mesh(world):
    layer, elsewhere = nn.Linear(4, 4), ShardPlacementResult(Shard(0), world["tp"])
    refused(
        "reshard_after_forward=4 must divide the 2 ranks",
        layer,
        reshard_after_forward=4,
        shard_placement_fn=lambda param: elsewhere if param is layer.bias else None,
    )
