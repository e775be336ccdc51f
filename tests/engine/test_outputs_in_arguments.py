"""Tensors that a forward leaves in its arguments, through which backward comes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import seeded
from tests.support.ranks import on_fake_ranks, on_threads
from tests.support.spread import spread


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
        self.blocks = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, x, use):
        make, _, found = KINDS[self.kind]
        into, more = make(), make()
        x = x * self.scale
        for layer in self.blocks:
            x = layer(x, into, more=more)
        return {
            "left": lambda: sum(found(into)),
            "more": lambda: sum(found(more)),
            "both": lambda: x + sum(found(into)),
        }[use]()


@spread(kind=list(KINDS), reshard_after_forward=[None, True])
@on_threads(2)
def test_a_loss_may_come_through_what_a_forward_has_left(kind, reshard_after_forward):
    model, plain = sharded_and_plain(Net(kind), reshard_after_forward=reshard_after_forward)
    for use in ("left", "both", "more", "left"):

        def step(model, rank, use=use):
            return model(inputs_of(rank), use).square().mean()

        check_gradients(model, plain, step, times=1, what=f"{use}: gradient")


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
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x, cache):
        for layer in self.blocks:
            x = layer(x, cache)
        return x * self.scale


@pytest.mark.parametrize("use_first", [False, True])
@on_threads(2)
def test_the_loss_of_one_forward_reaches_another_through_a_cache(use_first):
    """The loss of the second forward reaches the first through the cache alone."""

    def step(model, rank):
        cache = {}
        first = model(inputs_of(rank), cache)
        loss = model(inputs_of(rank) + 1, cache).square().mean()
        return loss + first.square().mean() if use_first else loss

    check_gradients(*sharded_and_plain(Decoder()), step)


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


@on_fake_ranks(2)
def test_what_is_left_elsewhere_is_not_found_and_torch_refuses_the_backward():
    layer = meshard.fully_shard(seeded(Stashes()))
    model = meshard.fully_shard(nn.Sequential(layer))
    x, into = torch.ones(1, 6, requires_grad=True), Opaque()
    for run in (
        lambda: model(x),
        lambda: layer(x, into=into),
    ):
        run()
        left = into.result if into.result is not None else layer.into.result
        with pytest.raises(RuntimeError, match="storage of size 0"):
            left.sum().backward()
    model(x)
    with pytest.raises(RuntimeError, match="storage of size 0"):
        torch.autograd.grad(layer.into.result.sum(), x)
