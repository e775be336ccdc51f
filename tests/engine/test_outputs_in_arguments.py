"""Tensors that a forward leaves in its arguments, through which backward comes."""

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import nn

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made
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


def leaving(kind):
    """Return a model, a loss of which may come through what its layers have left, or outputs."""
    make, leave, found = KINDS[kind]

    def forward_of_layer(layer, x, into, *, more):
        leave(into, torch.tanh(layer.key(x)))
        leave(more, layer.key(x).relu())
        return layer.up(x)

    def forward(model, x, use):
        into, more = make(), make()
        x = x * model.scale
        for layer in model.blocks:
            x = layer(x, into, more=more)
        return {
            "left": lambda: sum(found(into)),
            "more": lambda: sum(found(more)),
            "both": lambda: x + sum(found(into)),
        }[use]()

    blocks = [Made(forward_of_layer, key=nn.Linear(6, 6), up=nn.Linear(6, 6)) for _ in range(3)]
    return Made(forward, scale=nn.Parameter(torch.empty(6)), blocks=blocks)


@spread(kind=list(KINDS), reshard_after_forward=[None, True])
@on_threads(2)
def test_a_loss_may_come_through_what_a_forward_has_left(kind, reshard_after_forward):
    model, plain = sharded_and_plain(leaving(kind), reshard_after_forward=reshard_after_forward)
    for use in ("left", "both", "more", "left"):

        def step(model, rank, use=use):
            return model(inputs_of(rank), use).square().mean()

        check_gradients(model, plain, step, times=1, what=f"{use}: gradient")


@pytest.mark.parametrize("use_first", [False, True])
@on_threads(2)
def test_the_loss_of_one_forward_reaches_another_through_a_cache(use_first):
    """Layers attend to what they have been called with before, as a decoder with a cache does."""

    def attend(layer, x, cache):
        keys, values = torch.tanh(layer.key(x)), layer.value(x)
        if id(layer) in cache:
            pairs = zip(cache[id(layer)], (keys, values), strict=True)
            keys, values = (torch.cat(pair) for pair in pairs)
        cache[id(layer)] = keys, values
        return x + (x @ keys.t()).softmax(-1) @ values

    def forward(model, x, cache):
        for layer in model.blocks:
            x = layer(x, cache)
        return x * model.scale

    def step(model, rank):
        cache = {}
        first = model(inputs_of(rank), cache)
        loss = model(inputs_of(rank) + 1, cache).square().mean()
        return loss + first.square().mean() if use_first else loss

    blocks = [Made(attend, key=nn.Linear(6, 6), value=nn.Linear(6, 6)) for _ in range(2)]
    plain = Made(forward, blocks=blocks, scale=nn.Parameter(torch.empty(6)))
    check_gradients(*sharded_and_plain(plain), step)


@pytest.mark.parametrize("where", ["attribute", "argument"])
@on_fake_ranks(2)
def test_what_is_left_elsewhere_is_not_found_and_torch_refuses_the_backward(where):
    """In an object that neither pytree nor dataclasses know."""

    def forward(layer, x, into=None):
        (into or layer.into).result = layer.key(x)
        return layer.up(x)

    layer = Made(forward, key=nn.Linear(6, 6), up=nn.Linear(6, 6), into=types.SimpleNamespace())
    model = meshard.fully_shard(nn.Sequential(meshard.fully_shard(layer)))
    x, into = torch.ones(1, 6, requires_grad=True), types.SimpleNamespace()
    if where == "attribute":
        model(x)
    else:
        layer(x, into=into)
    left = (layer.into if where == "attribute" else into).result
    for backward in (lambda: torch.autograd.grad(left.sum(), x), left.sum().backward):
        with pytest.raises(RuntimeError, match="storage of size 0"):
            backward()
