"""Gradients of gradients, whatever was done before and whatever a unit returns."""

import pytest
import torch
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.integer_model import IntegerModel, fill_with_halves
from tests.support.models import Made
from tests.support.ranks import on_threads
from tests.support.replicated import SMALL, Pair
from tests.support.sharding import shard_blocks


def square(block, x):
    """Have a second derivative that is an integer."""
    return x + block.linear(x).square().clamp(max=4)


def make():
    dim = IntegerModel.in_dim
    blocks = [Made(square, linear=nn.Linear(dim, dim)) for _ in range(2)]
    return fill_with_halves(
        Made(lambda m, x: m.blocks[1](m.blocks[0](x).clamp(-2, 2)), blocks=blocks)
    )


class Square(nn.Module):
    def forward(self, x):
        return x.square()


def make_stack():
    """Return layers of which the last weight occurs in gradients of the output, not its bias."""
    layers = nn.Linear(IntegerModel.in_dim, 4), Square(), nn.Linear(4, 1)
    return fill_with_halves(nn.Sequential(*layers))


def penalty(model, x):
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()


def ordinary(model, x):
    model(x).sum().backward()


def replicate(model):
    return meshard.replicate(model, bucket_cap_mb=SMALL)


def shard_stack(model):
    meshard.fully_shard(model[0])
    return meshard.fully_shard(model)


@pytest.mark.parametrize("first", [ordinary, penalty])
@pytest.mark.parametrize(
    ("model", "shard"),
    [
        (make, shard_blocks),
        (make_stack, shard_stack),
        (make, replicate),
        (make_stack, replicate),
    ],
)
@on_threads(2)
def test_a_penalty_is_added_to_gradients_that_are_there(model, shard, first):
    pair = Pair(model(), make=shard)
    for step in (first, penalty, ordinary, penalty):
        pair.backward(0, step, step)
        pair.compare()


@pytest.mark.parametrize("sync", list(GradientSync))
@on_threads(2)
def test_a_penalty_after_an_unshard_of_a_unit_that_no_reshard_follows(sync):
    pair = Pair(make(), make=shard_blocks)
    pair.ours.blocks[0].unshard()
    for mode in (sync, sync, GradientSync.FULL):
        pair.ours.set_gradient_sync(mode)
        pair.backward(0, penalty, penalty)
    pair.compare()


VIEWS = {
    "split": lambda x: x.split(2, -1),
    "chunk": lambda x: x.chunk(2, -1),
    "unbind": lambda x: x.unbind(-1),
    "slices": lambda x: (x[..., :2], x[..., 2:]),
}


@pytest.mark.parametrize("place", ["a unit inside", "the root"])
@pytest.mark.parametrize("views", list(VIEWS))
@on_threads(2)
def test_a_penalty_through_one_of_several_views_of_an_output(views, place):
    def forward(model, x):
        return model.last(x)[0]

    def views_of(block, x):
        return VIEWS[views](block.linear(x).square())

    def step(model, x):
        x = x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(
            (out if place == "a unit inside" else out[0]).sum(), x, create_graph=True
        )
        gradient.square().sum().backward()

    last = Made(views_of, linear=nn.Linear(IntegerModel.in_dim, 4))
    if place == "the root":
        pair = Pair(fill_with_halves(last), make=meshard.fully_shard)
    else:
        model = fill_with_halves(Made(forward, last=last))
        pair = Pair(model, make=lambda m: (meshard.fully_shard(m.last), meshard.fully_shard(m))[1])
    pair.steps(range(2), step, step)
