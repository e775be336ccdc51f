"""``owner_optimizer``: each matrix is stepped on one rank, with the numbers of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import owner_optimizer
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

MUON = torch.optim.Muon


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


class Ordinary:
    """The ordinary optimizers in one process, which step the gradients of the sharded model."""

    def __init__(self, model, ours, cls, options, fallback_options):
        self.params = {name: nn.Parameter(whole(param)) for name, param in model.named_parameters()}
        rest = [param for name, param in self.params.items() if name not in ours.owners]
        chosen = [self.params[name] for name in ours.owners]
        self.optimizers = [cls(chosen, **options)]
        if rest:
            self.optimizers.append(torch.optim.AdamW(rest, **fallback_options))

    def step(self, model):
        for name, param in model.named_parameters():
            self.params[name].grad = None if param.grad is None else whole(param.grad)
        for optimizer in self.optimizers:
            optimizer.step()


def backward(model, step):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(3, 6, generator=generator)).square().sum().backward()


def compare(model, ours, ordinary, num_steps=4):
    for step in range(num_steps):
        ours.zero_grad()
        backward(model, step)
        ordinary.step(model)
        ours.step()
        for name, param in model.named_parameters():
            assert_same(whole(param), ordinary.params[name].detach(), bitwise=True, what=name)


@on_ranks(4)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_muon_steps_as_in_one_process(mesh):
    model = shard_blocks(seeded(MlpStack()), init_device_mesh("cpu", mesh))
    options = {"lr": 0.02, "weight_decay": 0.1}
    ours = owner_optimizer(model, MUON, **options, fallback_kwargs={"lr": 0.01})
    compare(model, ours, Ordinary(model, ours, MUON, options, {"lr": 0.01}))
