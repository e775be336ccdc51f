"""How do tests gather the units of a model by hand, and build graphs on what they show?"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import MlpStack, seeded
from tests.support.sharding import shard_blocks

BATCHES = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))


def both(mesh_shape=None, **kwargs):
    plain = seeded(MlpStack())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    shard_blocks(model, mesh, **kwargs)
    return model, plain


def units_of(model):
    return (*model.blocks, model)


def unshard(model):
    for unit in units_of(model):
        unit.unshard()


def reshard(model):
    for unit in units_of(model):
        unit.reshard()


def penalty_of(model):
    """Of parameters, of views of them, and with one as a constant."""
    block = model.blocks[1]
    squares = sum(param.square().sum() for param in model.parameters())
    views = (block.up.weight[1:4].t().exp().sum() + block.down.weight.view(-1).cos().sum()) * 0.1
    return 0.1 * (squares + views + (model.scale.sin() * model.shift.detach()).sum())


def loss_of(model, x):
    return model(x).square().mean()


def with_methods(plain):
    """Give a plain model the methods of units, which do nothing."""
    for each in units_of(plain):
        each.unshard = each.reshard = lambda: None
    return plain
