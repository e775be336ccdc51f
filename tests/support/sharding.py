"""Use ``shard_blocks`` for the usual units: one for each of ``model.blocks``, and the root."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshard
from tests.support.cases import CASES, Case


def shard_blocks(model: Any, mesh: DeviceMesh | None = None, **kwargs: Any) -> Any:
    """Shard every module in ``model.blocks``, then ``model``, with the same arguments."""
    for block in model.blocks:
        meshard.fully_shard(block, mesh, **kwargs)
    return meshard.fully_shard(model, mesh, **kwargs)


def sharded_case(
    name: str, mesh_shape: tuple[int, ...] = (2,), **kwargs: Any
) -> tuple[Case, nn.Module, nn.Module]:
    """Return a case, its model sharded, and its plain model."""
    case = CASES[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    model, plain = case.build(), case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, **kwargs)
    return case, model, plain


def edit(module: nn.Module) -> None:
    """Change every parameter in another way."""
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.mul_(0.5).add_(number / 64)


def padded(numel, multiple):
    """Return the least multiple of ``multiple`` that is not below ``numel``."""
    return -(-numel // multiple) * multiple
