"""Modules that use their weights, inputs and outputs in unusual ways."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks


class Detached(nn.Module):
    """Reads its weight where the gradient does not flow to it: a straight-through estimator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))

    def forward(self, x):
        rounded = self.weight + (self.weight.sign() - self.weight).detach()
        return torch.tanh(x @ self.weight.detach()) * (x @ rounded) * self.weight.detach().sum()


@dataclasses.dataclass
class Output:
    """A container that torch's pytree does not know."""

    hidden: torch.Tensor
    more: dict


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return Output(torch.tanh(self.layer(x)), {"twice": [2 * x]})


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, depth=2):
        return torch.tanh(self.layer(self(x, depth - 1) if depth else x))


class Force(nn.Module):
    """Differentiates a unit inside its own forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.energy = nn.Linear(6, 1)

    def forward(self, x):
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            force = torch.autograd.grad(torch.tanh(self.energy(inner)).sum(), inner)[0]
        return self.energy(x * self.scale) + force.sum(-1, keepdim=True)


class Stack(nn.Module):
    """Two units of a kind, in a root with parameters of its own."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = kind(), kind()
        self.own = nn.Parameter(torch.empty(6))

    def forward(self, x):
        for unit in (self.first, self.second):
            x = unit(x * self.own)
            x = x.hidden if isinstance(x, Output) else x
            x = x.expand(-1, 6)
        return x + self.own


@on_ranks(2)
@pytest.mark.parametrize("kind", [Detached, Wrapping, Recursive, Force])
def test_unusual_modules_train_like_plain_ones(kind):
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(Stack(kind))
    plain = copy.deepcopy(model)
    for unit in (model.first, model.second):
        if kind is Force:
            meshard.fully_shard(unit.energy, mesh)
        meshard.fully_shard(unit, mesh)
    meshard.fully_shard(model, mesh)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Returning(nn.Module):
    """Returns its own parameter: an embedding of positions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))

    def forward(self, x):
        return self.weight, x


@on_ranks(2)
def test_a_module_that_returns_its_parameter_gets_no_hooks_on_it():
    plain = seeded(Returning())
    model = meshard.fully_shard(copy.deepcopy(plain), reshard_after_forward=False)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            weight, x = each(torch.ones(6, 6))
            assert not weight._backward_hooks or weight.grad_fn is not None
            (weight * x).square().sum().backward()
        assert_same(full_grads(model), full_grads(plain))


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = self.layer(x)
        self.layer.weight = self.layer.weight  # its own name
        self.latest = self.layer.weight
        return x


@on_ranks(2)
def test_an_unsharded_parameter_gets_no_second_name():
    model = nn.Sequential(Assigning(), nn.Linear(6, 6))
    meshard.fully_shard(model[0])
    meshard.fully_shard(model)
    names = list(model.state_dict())
    text = "unsharded parameter 'layer.weight' was assigned to 'latest' of a Assigning.*Tie param"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            model(torch.ones(2, 6))
        assert list(model.state_dict()) == names
    assert all(isinstance(param, DTensor) for param in model.parameters())
