"""Models in several layouts, for what is saved in one and loaded in another."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional

import meshard
from tests.support.models import seeded
from tests.support.parity import whole


class Net(nn.Module):
    """Uneven rows, a tie, a frozen parameter, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        self.seen += 1
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x))) * self.gate.sum()
        return self.head(x)


def _sharded(model, mesh=None, **options):
    for layer in model.layers:
        meshard.fully_shard(layer, mesh, **options)
    return meshard.fully_shard(model, mesh, **options)


LAYOUTS = {
    "plain": lambda model: model,
    "replicate": meshard.replicate,
    "fully_shard": _sharded,
    "kept unsharded": lambda model: _sharded(model, reshard_after_forward=False),
    "HSDP": lambda model: _sharded(model, init_device_mesh("cpu", (dist.get_world_size() // 2, 2))),
    "columns": lambda model: _sharded(model, shard_placement_fn=lambda p: Shard(p.dim() - 1)),
}


def net(layout, seed=0):
    model = seeded(Net(), seed)
    nn.init.constant_(model.gate, 1 / 3)
    return LAYOUTS[layout](model)


def train(model, optimizer, steps, scheduler=None):
    """Take steps with batches and dropout by the generators of this rank; return the losses."""
    losses = []
    for _ in range(steps):
        tokens = torch.randint(11, (2, 4))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def values_of(model, optimizer=None):
    """Return all that is saved of a model and an optimizer, unsharded, by name."""
    found = {name: whole(each) for name, each in model.state_dict().items()}
    if optimizer is not None:
        names = {id(param): name for name, param in model.named_parameters()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, each in optimizer.state.get(param, {}).items():
                    found[f"{names[id(param)]}.{key}"] = whole(torch.as_tensor(each))
    return found


def assert_same_values(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def trained(layout, steps=1, seed=0):
    model = net(layout, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps)
    return model, optimizer


def check_loads(checkpointer, layout, expected, **kwargs):
    """Load into a model of other values, and compare all; return what ``load`` returned."""
    model = net(layout, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loaded = checkpointer.load(model, optimizer, **kwargs)
    assert_same_values(values_of(model, optimizer), expected)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert model.head.weight is model.embed.weight
    train(model, optimizer, 1)
    return loaded


class Odd(nn.Module):
    """A transposed parameter, and extra state."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t() + value)
        image = torch.arange(16.0).view(1, 4, 2, 2) + value
        self.image = nn.Parameter(image.to(memory_format=torch.channels_last))
        self.count = value

    def get_extra_state(self):
        return {"count": self.count, "amax": torch.tensor([float(self.count)])}

    def set_extra_state(self, state):
        self.count, self.amax = state["count"], state["amax"]
