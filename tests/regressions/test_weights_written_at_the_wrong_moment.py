"""Weights that are written between a forward and its backward, or in a forward."""

import pytest
import torch
from torch import nn

import meshard
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch, integer_loss
from tests.support.models import Made
from tests.support.ranks import on_fake_ranks, on_threads
from tests.support.sharding import shard_blocks


def plain(model):
    return model


def replicate(model):
    return meshard.replicate(model)


def kept(model):
    return shard_blocks(model, reshard_after_forward=False)


def step_in_between(model):
    """Step an optimizer between a forward and its backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    integer_loss(model(integer_batch(0, 0))).backward()
    loss = integer_loss(model(integer_batch(1, 0)))
    optimizer.step()
    loss.backward()


@pytest.mark.parametrize("shard", [plain, replicate, shard_blocks, kept])
@on_threads(2)
def test_a_step_between_a_forward_and_its_backward_is_an_error(shard):
    model = shard(IntegerModel())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|step"):
        step_in_between(model)
    if shard is not plain:
        model.reset_iter_state()  # which gives up the gathers in flight


@on_threads(2)
def test_a_step_after_the_backward_of_all_forwards_is_none():
    model = shard_blocks(IntegerModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for number in range(2):
        losses = [integer_loss(model(integer_batch(number, each))) for each in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def quantise(module, x):
    """Move the codebook towards its inputs, as vector quantisation does."""
    with torch.no_grad():
        module.codebook.lerp_(x.mean(0), 0.5)
    return x + module.codebook


def average(module, x):
    """Move one encoder towards the other, as MoCo does."""
    with torch.no_grad():
        module.codebook.mul_(0.9).add_(module.online, alpha=0.1)
    return x * module.online + module.codebook


def shorten(module, x):
    """Look rows up in an embedding, which scales them down in place."""
    return x + module.codebook(torch.arange(2))


EDITS = {
    "vector quantisation": (quantise, "codebook"),
    "momentum encoder": (average, "codebook"),
    "max_norm": (shorten, "codebook.weight"),
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", EDITS)
@on_fake_ranks(1)
def test_an_edit_of_weights_in_a_forward_is_warned_of_once(how, reshard):
    forward, name = EDITS[how]
    codebook = (
        nn.Embedding(2, 4, max_norm=0.1) if how == "max_norm" else nn.Parameter(torch.ones(4))
    )
    online = nn.Parameter(torch.full((4,), 2.0))
    block = Made(forward, codebook=codebook, online=online)
    meshard.fully_shard(block, reshard_after_forward=reshard)
    model = meshard.fully_shard(Made(lambda m, x: m.block(x), block=block))

    def run():
        for _ in range(2):
            model(torch.full((2, 4), 3.0)).sum().backward()
            model.reshard()

    with pytest.warns(UserWarning, match=rf"'{name}'(.|\n)*unsharded_params") as warned:
        run()
    assert len(warned) == 1
