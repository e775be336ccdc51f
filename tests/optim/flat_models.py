"""Models for flat optimizers, and training with them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import GradientSync, flat_optimizer
from tests.optim.optimizers import plain_state
from tests.support.models import seeded
from tests.support.parity import full_state


class Net(nn.Module):
    """Uneven layers, a parameter smaller than the number of ranks, and one that may rest."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.tiny = nn.Parameter(torch.empty(1, 13))
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))

    def forward(self, x, rest=None):
        x = self.first(x) * self.tiny
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if number != rest else x
        return x


def make(shape, *, per_layer=False, **kwargs):
    mesh = init_device_mesh("cpu", shape)
    model = seeded(Net())
    if per_layer:
        for layer in model.layers:
            meshard.fully_shard(layer, mesh, **kwargs)
    return meshard.fully_shard(model, mesh, **kwargs)


def backward(model, step, rest=None):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(3, 7, generator=generator), rest).square().sum().backward()


def train(model, optimizer, steps, schedule=(GradientSync.FULL,), rest=lambda step: None):
    for step in steps:
        for number, mode in enumerate(schedule):
            model.set_gradient_sync(mode)
            backward(model, 10 * step + number, rest(step))
        optimizer.step()
        optimizer.zero_grad()


# --- with a parameter in no unit, and edits between two steps ------------------------------


class LooseNet(nn.Module):
    """Square weights, an uneven one, one smaller than the number of ranks, one in no unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.loose = nn.Parameter(torch.empty(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.loose
        return self.head(x)


def make_loose(foreach=False):
    """Return a model; foreach kernels of the ordinary optimizer take no loose parameters."""
    model = seeded(LooseNet())
    mesh = init_device_mesh("cpu", (2,))
    meshard.fully_shard(model.layers[0], mesh)
    return meshard.fully_shard(model, mesh, ignored_params=set() if foreach else {model.loose})


def backward_loose(model, step):
    model(torch.full((2, 6), 0.1 * step + 0.1)).square().sum().backward()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def second(model, optimizer):
    """Return the state of a parameter that is not the first of its run."""
    return optimizer.state[model.layers[1].bias]


def halve_in_place(model, optimizer):
    second(model, optimizer)["exp_avg"].mul_(0.5)


def note(model, optimizer):
    """Entries of the user's own stay, and change nothing."""
    second(model, optimizer)["note"] = "mine"


def state_of(optimizer):
    """Return the state by the number of the parameter; the user's entries are left out."""
    found = plain_state(optimizer)
    for state in found.values():
        state.pop("note", None)
    return found


def trained(edit, *, is_flat, options):
    model = make_loose(options.get("foreach", False))
    params = list(model.parameters())
    cls = torch.optim.AdamW
    optimizer = flat_optimizer(model, cls, params, **options) if is_flat else cls(params, **options)
    for step in range(5):
        backward_loose(model, step)
        if step in (1, 3):
            edit(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model), state_of(optimizer)
