"""A model that tensor parallelism cuts before it is sharded, with its meshes."""

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

from tests.support.against_plain import inputs_of
from tests.support.models import Made, seeded


def _block():
    """Return a residual MLP behind a norm; 7 hidden units are divided by nothing."""
    return Made(
        lambda m, x: x + m.down(torch.tanh(m.up(m.norm(x)))),
        norm=nn.LayerNorm(6),
        up=nn.Linear(6, 7),
        down=nn.Linear(7, 6),
    )


def build():
    """Return ``[batch, length, 6]`` to the same; inlet and outlet are never cut."""

    def forward(model, x):
        x = model.inlet(x)
        for each in model.blocks:
            x = each(x)
        return model.outlet(x)

    inlet, outlet = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    return seeded(Made(forward, inlet=inlet, blocks=[_block(), _block()], outlet=outlet))


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


def batch_of(rank, number=0):
    """Return the batch of a rank: pairs of ranks along the axis of tensor parallelism share it."""
    return inputs_of(rank // 2, number, (2, 4, 6))


def meshes(kind):
    """Return the data-parallel mesh, and that of tensor parallelism."""
    if kind == "hsdp":
        world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        return world["replicate", "shard"], world["tp"]
    shape = (dist.get_world_size() // 2, 2)
    world = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return world["dp"], world["tp"]
