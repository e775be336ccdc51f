"""Named axes of a larger mesh, which shard and replicate."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshard
from meshard import DataParallelMeshDims, GradientSync
from tests.support.against_plain import check_gradients, check_training, inputs_of
from tests.support.models import seeded
from tests.support.ranks import on_fake_ranks, on_threads
from tests.support.spread import mostly_slow
from tests.support.threads import run_threads

TorchDims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
beside_torch = pytest.mark.skipif(TorchDims is None, reason="torch 2.11 has no named axes")
makes_one_axis = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.12 places parameters on each of several axes"
)
WHOLE = Replicate()
NAMES = {2: ("dp", "tp"), 3: ("nodes", "dp", "tp"), 4: ("nodes", "dp", "cp", "tp")}


def put_on(layer, mesh, weight, bias):
    for name, placements in (("weight", weight), ("bias", bias)):
        values = getattr(layer, name).detach()
        param = nn.Parameter(distribute_tensor(values, mesh, placements))
        # DTensor caches what operators yield, perhaps with an equal mesh of an earlier test;
        # torch asks for the very object.
        param._spec.mesh = mesh
        setattr(layer, name, param)
    return layer


@beside_torch
@pytest.mark.parametrize(
    ("shape", "dims", "cut"),
    [
        ((8, 2), {"shard": "dp"}, Shard(0)),
        ((8, 2), {"replicate": "dp"}, Shard(1)),
        ((8, 2), {"shard": "tp", "replicate": "dp"}, WHOLE),
        ((2, 4, 2), {"shard": "dp", "replicate": "nodes"}, Shard(0)),
        ((2, 4, 2), {"shard": "dp"}, Shard(0)),
        pytest.param((2, 4, 2), {"shard": ("nodes", "dp")}, Shard(1), marks=makes_one_axis),
        ((2, 2, 2, 2), {"shard": "cp", "replicate": ("nodes", "dp")}, Shard(0)),
        ((2, 2, 2, 2), {"replicate": ("nodes", "cp")}, Shard(0)),
    ],
)
@on_fake_ranks(16, rank=5)
def test_parameters_are_placed_as_torch_places_them(shape, dims, cut):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])
    whole = [WHOLE] * len(shape)
    ours, theirs, torchs = (
        put_on(nn.Linear(12, 12), mesh, [*whole[1:], cut], whole) for _ in "123"
    )
    meshard.fully_shard(ours, mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    meshard.fully_shard(torchs, mesh, dp_mesh_dims=TorchDims(**dims))
    torch_fully_shard(theirs, mesh=mesh, dp_mesh_dims=TorchDims(**dims))
    for expected, *found in zip(*(m.parameters() for m in (theirs, ours, torchs)), strict=True):
        for param in found:
            assert param.placements == expected.placements
            assert param.device_mesh == expected.device_mesh
            assert param.device_mesh.mesh_dim_names == expected.device_mesh.mesh_dim_names
            assert param.to_local().shape == expected.to_local().shape


def linear():
    return seeded(nn.Linear(5, 7))


def train_cut(dims, cut, **options):
    """Train on DTensors over all axes; batches differ along the data-parallel ones."""
    axes = NAMES[dist.get_world_size().bit_length() - 1]
    mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
    data = [Shard(0)] * (mesh.ndim - 1)
    bias = cut if cut == Shard(0) else WHOLE
    model = put_on(linear(), mesh, [*[WHOLE] * len(data), cut], [*[WHOLE] * len(data), bias])
    meshard.fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(**dims), **options)

    def step(each, rank):
        x = inputs_of(rank // 2, shape=(3, 5))
        if each is not model:
            return each(x).square().mean()
        y = each(DTensor.from_local(x, mesh, [*data, WHOLE], run_check=False))
        assert y.device_mesh == mesh
        return y.redistribute(placements=[*data, WHOLE]).to_local().square().mean()

    check_training(model, linear(), step, steps=2)


TWO_AXES = [(4, {"shard": "dp"}, Shard(0)), (4, {"replicate": "dp"}, Shard(1))]
THREE_AXES = [
    (8, {"shard": "dp", "replicate": "nodes"}, Shard(0)),
    (8, {"shard": ("nodes", "dp")}, Shard(0)),
    (8, {"replicate": ("nodes", "dp")}, Shard(0)),
]


@pytest.mark.parametrize(
    ("num_ranks", "dims", "cut"), mostly_slow(TWO_AXES + THREE_AXES, *TWO_AXES)
)
def test_named_axes_compute_like_one_process(num_ranks, dims, cut):
    run_threads(train_cut, num_ranks, dims, cut)


def test_a_cut_parameter_may_replicate_where_others_shard_over_two_axes():
    options = {"shard_placement_fn": lambda param: WHOLE if param.ndim == 1 else None}
    run_threads(train_cut, 8, {"shard": ("nodes", "dp")}, Shard(0), **options)


@on_threads(8)
def test_ordinary_parameters_lie_over_the_data_parallel_axes_only():
    """Ranks along the other axes hold the same, and compute the same."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES[3])
    dims = DataParallelMeshDims(shard="dp", replicate="nodes")
    model = meshard.fully_shard(linear(), mesh, dp_mesh_dims=dims)
    assert model.weight.placements == (Replicate(), Shard(0))
    assert model.weight.device_mesh.mesh_dim_names == ("nodes", "dp")

    def window(each, rank):
        for number, mode in enumerate((GradientSync.REDUCE_SCATTER, GradientSync.FULL)):
            if each is model:
                model.set_gradient_sync(mode)
            each(inputs_of(rank // 2, number, (3, 5))).square().mean().backward()

    check_gradients(model, linear(), window)


@on_fake_ranks(4)
def test_axes_are_read_by_their_place_unless_they_are_chosen_by_name():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    layer = meshard.fully_shard(nn.Linear(4, 4), mesh)
    assert layer.weight.placements == (Replicate(), Shard(0))
    dims = DataParallelMeshDims(shard="shard", replicate="replicate")
    layer = meshard.fully_shard(nn.Linear(4, 4), mesh, dp_mesh_dims=dims)
    assert layer.weight.placements == (Shard(0), Replicate())
