"""A model that tensor parallelism cuts before it is sharded, with its meshes and batches."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.models import seeded

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    """A residual MLP behind a norm; 7 hidden units are divided by nothing."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """``[batch, length, dim]`` to the same; inlet and outlet are never cut."""

    def __init__(self, dim=6, hidden=7):
        super().__init__()
        self.inlet = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(2))
        self.outlet = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def tensor_plan():
    # Kept as a DTensor in between: a plain tensor does not tell how uneven its cut is.
    return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def sequence_plan():
    return {
        "": PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_output=True,
        ),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }


def cut(model, tp, plan):
    for block in model.blocks:
        if plan == "tensor":
            parallelize_module(block, tp, tensor_plan())
        else:
            parallelize_module(block, tp, sequence_plan())
            whole_again = PrepareModuleOutput(
                output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
            )
            parallelize_module(block, tp, whole_again)
    return model


def build():
    return seeded(Net())


def batches(steps, data_rank):
    generator = torch.Generator().manual_seed(7 + data_rank)
    return [torch.randn(2, 4, 6, generator=generator) for _ in range(steps)]


def whole_batches(steps, data_ranks):
    each = [batches(steps, rank) for rank in range(data_ranks)]
    return [torch.cat(step) for step in zip(*each, strict=True)]


def loss_of(output):
    return (output + 0.5).square().mean()


def meshes(kind):
    """Return the data-parallel mesh, that of tensor parallelism, and this rank's place in data."""
    if kind == "dp":
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return world["dp"], world["tp"], world["dp"].get_local_rank()
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    data = world["replicate", "shard"]
    return data, world["tp"], dist.get_rank() // 2


def last_dim(param):
    return Shard(param.dim() - 1)
