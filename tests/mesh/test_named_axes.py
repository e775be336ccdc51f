"""Named axes of a larger mesh, which shard and replicate."""

import re
import warnings

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
from tests.support.fake import fake_group
from tests.support.parity import assert_same, full_grads, full_state, whole
from tests.support.spread import spread
from tests.support.threads import run_threads

TorchDims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
beside_torch = pytest.mark.skipif(TorchDims is None, reason="torch 2.11 has no named axes")
makes_one_axis = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.12 places parameters on each of several axes"
)
WHOLE = Replicate()
NAMES = {2: ("dp", "tp"), 3: ("nodes", "dp", "tp"), 4: ("nodes", "dp", "cp", "tp")}


def put_on(layer, mesh, weight, bias):
    """Put the parameters of a linear layer on ``mesh``."""
    for name, placements in (("weight", weight), ("bias", bias)):
        values = getattr(layer, name).detach()
        param = nn.Parameter(distribute_tensor(values, mesh, placements))
        # DTensor caches what operators yield, perhaps with an equal mesh of an earlier test;
        # torch asks for the very object.
        param._spec.mesh = mesh
        setattr(layer, name, param)
    return layer


CASES = [
    # mesh shape, axis names, dims, placements of the weight
    ((8, 2), NAMES[2], {"shard": "dp"}, [WHOLE, Shard(0)]),
    ((8, 2), NAMES[2], {"shard": "dp"}, [WHOLE, Shard(1)]),
    ((8, 2), NAMES[2], {"replicate": "dp"}, [WHOLE, Shard(0)]),
    ((8, 2), NAMES[2], {"shard": "tp", "replicate": "dp"}, [WHOLE, WHOLE]),
    ((2, 8), ("tp", "dp"), {"shard": "dp"}, [Shard(0), WHOLE]),
    ((2, 4, 2), NAMES[3], {"shard": "dp", "replicate": "nodes"}, [WHOLE, WHOLE, Shard(0)]),
    ((2, 4, 2), NAMES[3], {"shard": "dp"}, [WHOLE, WHOLE, Shard(0)]),
    pytest.param(
        (2, 4, 2),
        NAMES[3],
        {"shard": ("nodes", "dp")},
        [WHOLE, WHOLE, Shard(1)],
        marks=makes_one_axis,
    ),
    pytest.param(
        (2, 2, 2, 2),
        NAMES[4],
        {"shard": ("dp", "cp"), "replicate": "nodes"},
        [WHOLE, WHOLE, WHOLE, Shard(0)],
        marks=makes_one_axis,
    ),
    (
        (2, 2, 2, 2),
        NAMES[4],
        {"shard": "cp", "replicate": ("nodes", "dp")},
        [WHOLE, WHOLE, WHOLE, Shard(0)],
    ),
    ((2, 2, 2, 2), NAMES[4], {"replicate": ("nodes", "cp")}, [WHOLE, WHOLE, WHOLE, Shard(0)]),
]


@beside_torch
@pytest.mark.parametrize(("shape", "names", "dims", "placements"), CASES)
def test_parameters_are_placed_as_torch_places_them(shape, names, dims, placements):
    with fake_group(16, rank=5):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        whole_everywhere = [WHOLE] * len(shape)
        ours = put_on(nn.Linear(12, 12), mesh, placements, whole_everywhere)
        theirs = put_on(nn.Linear(12, 12), mesh, placements, whole_everywhere)
        meshard.fully_shard(ours, mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
        torch_fully_shard(theirs, mesh=mesh, dp_mesh_dims=TorchDims(**dims))
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert one.placements == other.placements
            assert one.device_mesh == other.device_mesh
            assert one.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names
            assert one.to_local().shape == other.to_local().shape


class Cut(nn.Module):
    """A linear layer that computes with DTensors over all axes."""

    def __init__(self, mesh, placements, rows=7):
        super().__init__()
        self.linear = nn.Linear(5, rows)
        with torch.no_grad():
            for param in self.linear.parameters():
                param.copy_(torch.linspace(-0.3, 0.4, param.numel()).view_as(param))
        if mesh is not None:
            bias = [p if p == Shard(0) else WHOLE for p in placements]
            put_on(self.linear, mesh, placements, bias)

    def forward(self, x):
        y = self.linear(x)
        assert not isinstance(x, DTensor) or y.device_mesh == x.device_mesh
        return y


def input_of(number):
    return torch.linspace(-1.0, 1.0, 15).view(3, 5) + number


def compute(kind, dims, placements):
    """Train on the mesh of the case, two steps; batches differ along data-parallel axes."""
    shard, dims_of = {
        "ours": (meshard.fully_shard, DataParallelMeshDims),
        "torch": (torch_fully_shard, TorchDims),
    }[kind]
    num_axes = len(placements)
    shape = {2: (2, 2), 3: (2, 2, 2)}[num_axes]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[num_axes])
    model = Cut(mesh, placements)
    shard(model, mesh=mesh, dp_mesh_dims=dims_of(**dims))
    data_axes = mesh.ndim - 1
    number = dist.get_rank() // 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        x = DTensor.from_local(
            input_of(number + step), mesh, [Shard(0)] * data_axes + [WHOLE], run_check=False
        )
        y = model(x).redistribute(placements=[Shard(0)] * data_axes + [WHOLE])
        y.to_local().square().mean().backward()
        grads = full_grads(model)
        optimizer.step()
    return grads, full_state(model)


def compute_plain(data_ranks):
    model = Cut(None, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        batch = torch.cat([input_of(number + step) for number in range(data_ranks)])
        model(batch).square().mean().backward()
        grads = full_grads(model)
        optimizer.step()
    return grads, full_state(model)


@spread(dims=[{"shard": "dp"}, {"replicate": "dp"}], cut=[Shard(0), Shard(1)])
def test_two_axes_compute_like_one_process(dims, cut):
    grads, params = compute_plain(2)
    for found in run_threads(compute, 4, "ours", dims, [WHOLE, cut]):
        assert_same(found[0], grads)
        assert_same(found[1], params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims",
    [
        {"shard": "dp", "replicate": "nodes"},
        {"shard": ("nodes", "dp")},
        {"replicate": ("nodes", "dp")},
    ],
)
def test_three_axes_compute_like_one_process(dims):
    grads, params = compute_plain(4)
    for found in run_threads(compute, 8, "ours", dims, [WHOLE, WHOLE, Shard(0)]):
        assert_same(found[0], grads)
        assert_same(found[1], params)


@beside_torch
@pytest.mark.slow
@pytest.mark.parametrize("dims", [{"shard": "dp"}, {"replicate": "dp"}])
def test_torch_computes_the_same(run_ranks, dims):
    """The peer's gradients are the mean over data-parallel ranks too."""
    placements = [WHOLE, Shard(0)]
    ours = run_ranks(compute, 4, "ours", dims, placements, timeout=200)
    theirs = run_ranks(compute, 4, "torch", dims, placements)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one[0], other[0])
        assert_same(one[1], other[1])


def shard_plain():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES[3])
    dims = DataParallelMeshDims(shard="dp", replicate="nodes")
    model = meshard.fully_shard(Cut(None, None), mesh, dp_mesh_dims=dims)
    weight = model.linear.weight
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.device_mesh.mesh_dim_names == ("nodes", "dp")
    mode = [GradientSync.REDUCE_SCATTER, GradientSync.FULL]
    for step in range(2):
        model.set_gradient_sync(mode[step])
        model(input_of(dist.get_rank() // 2 + step)).square().mean().backward()
    return whole(model.linear.weight.grad)


def test_ordinary_parameters_lie_over_the_data_parallel_axes_only():
    """Ranks along the other axes hold the same, and compute the same."""
    plain = Cut(None, None)
    for step in range(2):
        batch = torch.cat([input_of(number + step) for number in range(4)])
        plain(batch).square().mean().backward()
    for grad in run_threads(shard_plain, 8):
        assert_same(grad, plain.linear.weight.grad)


@beside_torch
def test_torch_refuses_ordinary_parameters():
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="must be DTensors on the full SPMD mesh"):
            torch_fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=TorchDims(shard="dp"))


@beside_torch
def test_dims_of_torch_are_taken():
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = meshard.fully_shard(nn.Linear(4, 4), mesh, dp_mesh_dims=TorchDims(shard="dp"))
        assert layer.weight.placements == (Shard(0),)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({}, ValueError, "needs shard=, replicate=, or both"),
        ({"shard": "dp", "replicate": "dp"}, ValueError, "names ['dp'] twice"),
        ({"shard": ("dp", "dp")}, ValueError, "names ['dp'] twice"),
        ({"shard": ["dp"]}, TypeError, "shard must be a name or a tuple of names, got ['dp']"),
        ({"replicate": 1}, TypeError, "replicate must be a name or a tuple of names, got 1"),
        ({"replicate": ()}, ValueError, "needs shard=, replicate=, or both"),
    ],
)
def test_wrong_names_are_refused_when_they_are_given(kwargs, error, text):
    with pytest.raises(error, match=re.escape(text)):
        DataParallelMeshDims(**kwargs)


@pytest.fixture
def mesh():
    with fake_group(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def refused(text, layer, mesh, dims, error=ValueError):
    before = dict(layer.named_parameters())
    with pytest.raises(error, match=text):
        meshard.fully_shard(layer, mesh, dp_mesh_dims=dims)
    assert type(layer) is nn.Linear
    assert all(layer.get_parameter(name) is param for name, param in before.items())


def test_an_axis_that_does_not_exist_is_refused(mesh):
    dims = DataParallelMeshDims(shard="ep")
    refused(r"names the axis 'ep', but .* has \('dp', 'tp'\)", nn.Linear(4, 4), mesh, dims)


def test_names_in_another_order_than_the_mesh_are_refused(mesh):
    dims = DataParallelMeshDims(shard=("tp", "dp"))
    refused("in another order; name them in the order", nn.Linear(4, 4), mesh, dims)


def test_a_mesh_without_names_is_refused(mesh):
    nameless = init_device_mesh("cpu", (2, 2))
    dims = DataParallelMeshDims(shard="dp")
    refused("has no names; pass mesh_dim_names", nn.Linear(4, 4), nameless, dims)


def test_no_mesh_is_refused(mesh):
    refused("pass mesh as well", nn.Linear(4, 4), None, DataParallelMeshDims(shard="dp"))


def test_something_else_than_dims_is_refused(mesh):
    refused("must be a DataParallelMeshDims or None", nn.Linear(4, 4), mesh, "dp", TypeError)


def test_a_parameter_that_is_sharded_over_a_data_parallel_axis_is_refused(mesh):
    layer = put_on(nn.Linear(4, 4), mesh, [WHOLE, WHOLE], [Shard(0), WHOLE])
    text = r"'bias' is a DTensor already: it has placement .* on the data-parallel axis 'dp'"
    refused(text, layer, mesh, DataParallelMeshDims(shard="dp"))


def test_a_parameter_on_another_mesh_is_refused(mesh):
    layer = put_on(nn.Linear(4, 4), mesh["tp"], [Shard(0)], [Shard(0)])
    text = "'weight' is a DTensor already: .* must lie over the mesh that was passed"
    refused(text, layer, mesh, DataParallelMeshDims(shard="dp"))


@pytest.mark.parametrize("names", [("shard", "replicate"), ("dp_shard", "dp_replicate")])
def test_names_that_say_the_other_way_round_are_warned_of(names):
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.warns(UserWarning, match=f"'{names[0]}' replicates") as caught:
            meshard.fully_shard(nn.Linear(4, 4), mesh)
        assert "dp_mesh_dims=DataParallelMeshDims" in str(caught[0].message)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("names", [("replicate", "shard"), None, ("a", "b")])
def test_other_names_are_not_warned_of(names):
    with fake_group(4), warnings.catch_warnings():
        warnings.simplefilter("error")
        meshard.fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def test_axes_that_are_chosen_by_name_may_have_any_order():
    with fake_group(4), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
        dims = DataParallelMeshDims(shard="shard", replicate="replicate")
        layer = meshard.fully_shard(nn.Linear(4, 4), mesh, dp_mesh_dims=dims)
        assert layer.weight.placements == (Shard(0), Replicate())
