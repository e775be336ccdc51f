"""Ways to lay a model out over ranks, by name, each beside the plain model."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import meshard
from tests.mesh import tensor_parallel
from tests.support.cases import CASES
from tests.support.sharding import shard_blocks


class WithBuffers(nn.Module):
    """Blocks beside buffers of which one is in no state dict."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CASES["mlp_stack"].build().blocks)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.arange(10.0).view(2, 5))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def last_dim(param):
    return Shard(param.dim() - 1)


def lay_out(name):
    """Return the sharded model and the plain one with the same values."""
    if name == "tensor_parallel":
        plain = tensor_parallel.build()
        dp, tp, _ = tensor_parallel.meshes("dp")
        model = tensor_parallel.cut(copy.deepcopy(plain), tp, "tensor")
        return shard_blocks(model, dp), plain
    on_host = {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)}
    case, kwargs, shape = {
        "sharded": ("transformer", {}, None),
        "tied": ("transformer_tied", {}, None),
        "uneven": ("uneven", {}, None),
        "frozen": ("frozen_beside", {}, None),
        "mixed_dtype": ("mixed_dtype", {}, None),
        "tied_inside": ("tied_inside", {}, None),
        "last_dim": ("uneven", {"shard_placement_fn": last_dim}, None),
        "hsdp": ("mlp_stack", {}, (2, 2)),
        "offloaded": ("mlp_stack", on_host, None),
        "buffers": ("", {}, None),
        "replicated": ("mlp_stack", {}, None),
        "plain": ("mlp_stack", {}, None),
    }[name]
    plain = CASES[case].build() if case else WithBuffers()
    model = copy.deepcopy(plain)
    if name == "plain":
        return model, plain
    mesh = init_device_mesh("cpu", shape or (torch.distributed.get_world_size(),))
    if name == "replicated":
        return meshard.replicate(model, mesh), plain
    for unit in [*getattr(model, "blocks", getattr(model, "layers", [])), model]:
        meshard.fully_shard(unit, mesh, **kwargs)
    return model, plain


LAYOUTS = (
    "sharded",
    "tied",
    "uneven",
    "frozen",
    "mixed_dtype",
    "tied_inside",
    "last_dim",
    "offloaded",
    "buffers",
    "replicated",
    "plain",
)
ON_FOUR = ("hsdp", "tensor_parallel", "uneven", "last_dim")
