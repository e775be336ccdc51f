"""Parameters that two axes of a mesh have cut before they are sharded."""

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshard
from tests.support.parity import whole
from tests.support.ranks import on_threads
from tests.support.spread import spread


class Scaled(nn.Module):
    """A parameter that is used as it was placed, without hooks of tensor parallelism."""

    def __init__(self, mesh, placements, shape=(7, 3)):
        super().__init__()
        values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        self.weight = nn.Parameter(distribute_tensor(values, mesh, placements))

    def forward(self, x):
        return self.weight.to_local() * x


@on_threads(8)
@spread(
    shape=[(8, 4), (7, 3), (3, 5), (1, 1)],
    placements=[(Shard(0), Shard(1)), (Shard(0), Shard(0))],
    shard_dim=[0, 1],
)
def test_two_axes_may_have_cut_a_parameter_before(shape, placements, shard_dim):
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    model = Scaled(world["cp", "tp"], placements, shape)
    expected = model.weight.full_tensor().detach()
    meshard.fully_shard(model, world["dp"], shard_placement_fn=lambda _: Shard(shard_dim))
    assert torch.equal(whole(model.weight), expected)
    factor = 1.0 + world["dp"].get_local_rank()
    model(factor).sum().backward()
    assert torch.equal(whole(model.weight.grad), torch.full(shape, 1.5))
