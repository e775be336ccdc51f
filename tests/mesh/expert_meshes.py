"""A model whose experts are sharded over a mesh of their own, beside dense layers on another.

``Net`` has blocks of a dense layer and an expert; ``shard`` lays them over ``meshes``.
"""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from meshard import ShardPlacementResult
from tests.support.models import seeded
from tests.support.sharding import shard_blocks

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def last_dim(param):
    return Shard(param.dim() - 1)


def loss_of(output):
    return (output + 0.5).square().mean()


def batch_of(step, rank, width=5):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator)


class Block(nn.Module):
    """A dense layer and an expert; the expert's parameters go onto a mesh of their own."""

    def __init__(self, dim):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.expert = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.expert(torch.tanh(self.dense(x)))


class Net(nn.Module):
    """Blocks between parameters of the root, which has an expert too."""

    def __init__(self, dim=5):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.expert = nn.Linear(dim, dim)

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.expert(x)


def is_expert(name):
    return "expert" in name


def meshes(kind):
    """Return the mesh of most parameters, and that of the experts."""
    if kind == "flat":
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
        return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), world["edp"]
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ep", "nodes", "edp"))
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("nodes", "dp"))
    return hybrid, world["nodes", "edp"]


def build():
    return seeded(Net())


def shard(model, kind, **kwargs):
    most, of_experts = meshes(kind)
    experts = {param for name, param in model.named_parameters() if is_expert(name)}

    def placement_fn(param):
        return ShardPlacementResult(last_dim(param), of_experts) if param in experts else None

    return shard_blocks(model, most, shard_placement_fn=placement_fn, **kwargs)
