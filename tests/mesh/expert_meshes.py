"""A model whose experts are sharded over a mesh of their own, beside dense layers on another."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from meshard import ShardPlacementResult
from tests.support.against_plain import inputs_of
from tests.support.models import Made, seeded
from tests.support.sharding import shard_blocks


def block():
    return Made(
        lambda m, x: x + m.expert(torch.tanh(m.dense(x))),
        dense=nn.Linear(5, 5),
        expert=nn.Linear(5, 5),
    )


def net():
    """Return blocks between parameters of the root, which has an expert too."""

    def forward(model, x):
        x = x * model.scale
        for each in model.blocks:
            x = each(x)
        return model.expert(x)

    scale = nn.Parameter(torch.empty(5))
    return Made(forward, scale=scale, blocks=[block(), block()], expert=nn.Linear(5, 5))


def build():
    return seeded(net())


def batch_of(rank, number=0):
    return inputs_of(rank, number, (3, 5))


def meshes(kind):
    """Return the mesh of most parameters, and that of the experts."""
    if kind == "flat":
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
        return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), world["edp"]
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ep", "nodes", "edp"))
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("nodes", "dp"))
    return hybrid, world["nodes", "edp"]


def experts_on(mesh, model, dim=0):
    """Return a ``shard_placement_fn`` that cuts a dim of the experts over ``mesh``."""
    experts = {param for name, param in model.named_parameters() if "expert" in name}

    def placement_fn(param):
        return ShardPlacementResult(Shard(dim % param.dim()), mesh) if param in experts else None

    return placement_fn


def shard(model, kind, **kwargs):
    most, of_experts = meshes(kind)
    placement_fn = experts_on(of_experts, model, dim=-1)
    return shard_blocks(model, most, shard_placement_fn=placement_fn, **kwargs)
