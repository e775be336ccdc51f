"""Modules that use their weights, inputs and outputs in unusual ways."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import MlpStack, seeded
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.spread import spread


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


@pytest.mark.parametrize("kind", [Detached, Wrapping, Recursive, Force])
@on_threads(2)
def test_unusual_modules_train_like_plain_ones(kind):
    energies = ("first.energy", "second.energy") if kind is Force else ()
    check_training(*sharded_and_plain(Stack(kind), (*energies, "first", "second")))


class Returning(nn.Module):
    """Returns its own parameter: an embedding of positions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))

    def forward(self, x):
        return self.weight, x


@on_threads(2)
def test_a_module_that_returns_its_parameter_gets_no_hooks_on_it():
    def step(model, rank):
        weight, x = model(torch.ones(6, 6))
        assert not weight._backward_hooks or weight.grad_fn is not None
        return (weight * x).square().sum()

    check_gradients(*sharded_and_plain(Returning(), (), reshard_after_forward=False), step)


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = self.layer(x)
        self.layer.weight = self.layer.weight  # its own name
        self.latest = self.layer.weight
        return x


@on_fake_ranks(2)
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


class Identity(nn.Module):
    """Returns what a layer inside it returned, which may be a unit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


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


LAYERS = {"view": lambda: nn.Linear(4, 4), "plain": lambda: nn.LayerNorm(4), "nested": Identity}


@spread(kind=[*LAYERS, *LAYERS], reshard=[True, False, None, None, True, False])
@on_threads(2)
def test_outputs_may_be_changed_in_place(kind, reshard):
    def step(model, rank):
        out = model(inputs_of(rank, shape=(1, 3, 4)))
        out += 1
        return out.square().sum()

    inner = [f"layers.{number}.inner" for number in range(3)] if kind == "nested" else []
    model, plain = sharded_and_plain(
        Residual(LAYERS[kind]), (*inner, "layers"), reshard_after_forward=reshard
    )
    check_gradients(model, plain, step)


FORWARD_MODE = {
    "replicated": None,
    "hsdp": {"mesh_shape": (2, 1)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("kind", FORWARD_MODE)
@on_ranks(2)
def test_losses_of_forward_derivatives(kind):
    """``torch.func.jvp`` through units of every kind; ``tests.peers`` has it beside the peer."""

    def step(model, rank):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
            x, tangent = inputs_of(rank), inputs_of(rank, 1)
            out, derivative = torch.func.jvp(model, (x,), (tangent,))
        return out.square().mean() + derivative.square().mean()

    if kind == "replicated":
        model, plain = seeded(MlpStack()), seeded(MlpStack())
        meshard.replicate(model, init_device_mesh("cpu", (2,)), bucket_cap_mb=1e-3)
    else:
        model, plain = sharded_and_plain(MlpStack(), **FORWARD_MODE[kind])
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    for _ in range(3):  # replicated parameters get their last buckets in the third
        check_gradients(model, plain, step, times=1, dtype=dtype)
