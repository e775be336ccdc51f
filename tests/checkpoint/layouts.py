"""Ways to lay a model out over four ranks, by name, each beside the plain model."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import meshard
from tests.mesh import tensor_parallel
from tests.support.cases import CASES
from tests.support.sharding import shard_blocks

ON_HOST = {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)}
# The case, and what fully_shard is told.
LAYOUTS = {
    "sharded": ("transformer", {}),
    "tied": ("transformer_tied", {}),
    "uneven": ("uneven", {}),
    "frozen": ("frozen_beside", {}),
    "mixed_dtype": ("mixed_dtype", {}),
    "tied_inside": ("tied_inside", {}),
    "last_dim": ("uneven", {"shard_placement_fn": lambda param: Shard(param.dim() - 1)}),
    "hsdp": ("mlp_stack", {}),
    "offloaded": ("mlp_stack", ON_HOST),
    "buffers": ("mlp_stack", {}),
    "replicated": ("mlp_stack", {}),
    "plain": ("mlp_stack", {}),
    "tensor_parallel": ("", {}),
}


def lay_out(name):
    """Return the sharded model and the plain one with the same values."""
    if name == "tensor_parallel":
        plain = tensor_parallel.build()
        dp, tp = tensor_parallel.meshes("dp")
        model = tensor_parallel.cut(copy.deepcopy(plain), tp, "tensor")
        return shard_blocks(model, dp), plain
    case, kwargs = LAYOUTS[name]
    plain = CASES[case].build()
    if name == "buffers":
        plain.register_buffer("count", torch.tensor(3))
        plain.register_buffer("table", torch.arange(10.0).view(2, 5))
        plain.register_buffer("hidden", torch.ones(2), persistent=False)
    model = copy.deepcopy(plain)
    if name == "plain":
        return model, plain
    mesh = init_device_mesh(
        "cpu", (2, 2) if name == "hsdp" else (torch.distributed.get_world_size(),)
    )
    if name == "replicated":
        return meshard.replicate(model, mesh), plain
    for unit in CASES[case].units(model):
        meshard.fully_shard(unit, mesh, **kwargs)
    return model, plain
