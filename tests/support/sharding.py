"""The usual way to shard a small model: one unit for each of its blocks, and the root."""

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import meshard

Model = TypeVar("Model", bound=nn.Module)


def shard_blocks(model: Model, mesh: DeviceMesh | None = None, **kwargs: Any) -> Model:
    """Shard every module in ``model.blocks``, then ``model``, with the same arguments."""
    blocks: Any = model.blocks
    for block in blocks:
        meshard.fully_shard(block, mesh, **kwargs)
    return meshard.fully_shard(model, mesh, **kwargs)
