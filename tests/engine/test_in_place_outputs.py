"""Outputs of units that are changed in place."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads


class Residual(nn.Module):
    """Adds to what its layers return, in place; a linear layer returns a view of 3D inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y * 2
        return self.layers[0](x)


class Identity(nn.Module):
    """Returns what a layer inside it returned, which may be a unit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


LAYERS = {"view": lambda: nn.Linear(4, 4), "plain": lambda: nn.LayerNorm(4), "nested": Identity}


@on_threads(2)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_outputs_may_be_changed_in_place(kind, reshard):
    plain = seeded(Residual(LAYERS[kind]))
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        if kind == "nested":
            meshard.fully_shard(layer.inner, mesh, reshard_after_forward=reshard)
        meshard.fully_shard(layer, mesh, reshard_after_forward=reshard)
    meshard.fully_shard(model, mesh, reshard_after_forward=reshard)
    x = torch.arange(24.0).view(2, 3, 4) / 10
    for _ in range(2):
        for each, batch in ((model, x[dist.get_rank()][None]), (plain, x)):
            each.zero_grad()
            out = each(batch)
            out += 1
            (out.square().sum() / (1 if each is model else 2)).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert_same(full_grads(model), expected)
