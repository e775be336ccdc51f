"""Tensors that a forward leaves in its arguments, through which backward comes."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks


@dataclasses.dataclass
class Bag:
    tensors: tuple[Any, ...] = ()


KINDS = {  # what a forward is called with, how it leaves a tensor there, how it is found again
    "list": (list, lambda into, left: into.append(left), list),
    "dict": (dict, lambda into, left: into.update({len(into): left}), lambda into: into.values()),
    "dataclass": (
        Bag,
        lambda into, left: setattr(into, "tensors", (*into.tensors, left)),
        lambda into: into.tensors,
    ),
    "list in a tuple": (
        lambda: ([],),
        lambda into, left: into[0].append(left),
        lambda into: into[0],
    ),
}


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.key, self.up = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, into, *, more):
        leave = KINDS[self.kind][1]
        leave(into, torch.tanh(self.key(x)))
        leave(more, self.key(x).relu())
        return self.up(x)


class Net(nn.Module):
    """Its loss may come through what its layers have left, through their outputs, or both."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.empty(6))
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, x, use):
        make, _, found = KINDS[self.kind]
        into, more = make(), make()
        x = x * self.scale
        for layer in self.layers:
            x = layer(x, into, more=more)
        return {
            "left": lambda: sum(found(into)),
            "more": lambda: sum(found(more)),
            "both": lambda: x + sum(found(into)),
        }[use]()


def sharded(plain, **kwargs):
    model = copy.deepcopy(seeded(plain))
    for unit in (*model.layers, model):
        meshard.fully_shard(unit, init_device_mesh("cpu", (2,)), **kwargs)
    return model


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_may_come_through_what_a_forward_has_left(kind, reshard_after_forward):
    plain = Net(kind)
    model = sharded(plain, reshard_after_forward=reshard_after_forward)
    batches = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for use in ("left", "both", "more", "left"):
        for each, x in ((model, batches[dist.get_rank()]), (plain, batches.flatten(0, 1))):
            each.zero_grad()
            each(x, use).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))


class Attending(nn.Module):
    """Attends to what it has been called with before, as a decoder with a cache does."""

    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, cache):
        keys, values = torch.tanh(self.key(x)), self.value(x)
        if id(self) in cache:
            keys, values = (
                torch.cat(pair) for pair in zip(cache[id(self)], (keys, values), strict=True)
            )
        cache[id(self)] = keys, values
        return x + (x @ keys.t()).softmax(-1) @ values


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.layers = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x, cache):
        for layer in self.layers:
            x = layer(x, cache)
        return x * self.scale


@on_ranks(2)
def test_the_loss_of_one_forward_reaches_another_through_a_cache():
    """The loss of the second forward reaches the first through the cache alone."""
    plain = Decoder()
    model = sharded(plain)
    batches = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for use_first in (False, True):
        for each in (model, plain):
            each.zero_grad()
        for rank in range(2):
            for each in (model, plain):
                if each is model and rank != dist.get_rank():
                    continue
                cache = {}
                first = each(batches[rank], cache)
                loss = each(batches[rank] + 1, cache).square().mean()
                loss = loss + first.square().mean() if use_first else loss
                (loss if each is model else loss / 2).backward()
        assert_same(full_grads(model), full_grads(plain))


class Opaque:
    """An object that neither pytree nor dataclasses know."""

    result = None


class Stashes(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.up = nn.Linear(6, 6), nn.Linear(6, 6)
        self.into = Opaque()

    def forward(self, x, into=None):
        (into or self.into).result = self.key(x)
        return self.up(x)


@on_ranks(2)
def test_what_is_left_elsewhere_is_not_found_and_torch_refuses_the_backward():
    layer = seeded(Stashes())
    mesh = init_device_mesh("cpu", (2,))
    meshard.fully_shard(layer, mesh)
    model = meshard.fully_shard(nn.Sequential(layer), mesh)
    x = torch.ones(1, 6, requires_grad=True)
    text = "storage of size 0"
    model(x)
    with pytest.raises(RuntimeError, match=text):
        layer.into.result.sum().backward()
    model(x)
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(layer.into.result.sum(), x)
    into = Opaque()
    layer(x, into=into)
    with pytest.raises(RuntimeError, match=text):
        into.result.sum().backward()
