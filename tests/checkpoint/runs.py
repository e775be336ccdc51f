"""Models in several layouts, for what is saved in one and loaded in another."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import meshard
from tests.support.models import seeded


class Net(nn.Module):
    """Uneven rows, a tie, a frozen parameter, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x))) * self.gate.sum()
        return self.head(x)


def _sharded(model, mesh=None, **options):
    for layer in model.layers:
        meshard.fully_shard(layer, mesh, **options)
    return meshard.fully_shard(model, mesh, **options)


def _hsdp(model):
    return _sharded(model, init_device_mesh("cpu", (dist.get_world_size() // 2, 2)))


def _columns(model):
    return _sharded(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


LAYOUTS = {
    "plain": lambda model: model,
    "replicate": meshard.replicate,
    "fully_shard": _sharded,
    "kept unsharded": lambda model: _sharded(model, reshard_after_forward=False),
    "HSDP": _hsdp,
    "columns": _columns,
}


def net(layout: str, seed: int = 0) -> nn.Module:
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


def unsharded(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values_of(model, optimizer=None):
    """Return all that is saved of a model and an optimizer, unsharded, by name."""
    found = {name: unsharded(each.detach()).clone() for name, each in model.state_dict().items()}
    if optimizer is not None:
        names = {id(param): name for name, param in model.named_parameters()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, each in optimizer.state.get(param, {}).items():
                    value = (
                        unsharded(each) if isinstance(each, torch.Tensor) else torch.tensor(each)
                    )
                    found[f"{names[id(param)]}.{key}"] = value.clone()
    return found


def assert_same_values(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
