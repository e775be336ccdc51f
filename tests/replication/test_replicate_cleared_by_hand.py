"""What ``param.grad = None`` drops, beside ``zero_grad()``: a line in docs/migrate/from-ddp.md."""

import pytest
import torch
from torch import nn

import meshard
from tests.support.models import seeded
from tests.support.ranks import on_threads

FIRST, SECOND = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])


def by_hand(model):
    for param in model.parameters():
        param.grad = None


def by_zero_grad(model):
    model.zero_grad()


@on_threads(2)
@pytest.mark.parametrize(
    ("clear", "mode", "is_dropped"),
    [
        (by_hand, meshard.GradientSync.NONE, False),  # it is in the bucket, and not in .grad
        (by_zero_grad, meshard.GradientSync.NONE, True),
        (by_hand, meshard.GradientSync.FULL, True),
        (by_zero_grad, meshard.GradientSync.FULL, True),
    ],
)
def test_what_is_dropped(clear, mode, is_dropped):
    """Run two backwards, the first under ``mode``, with ``clear`` in between."""
    model = meshard.replicate(seeded(nn.Linear(2, 1, bias=False), 0))
    with meshard.gradient_sync(model, mode):
        model(FIRST).sum().backward()
    clear(model)
    model(SECOND).sum().backward()
    assert torch.equal(model.weight.grad, SECOND if is_dropped else FIRST + SECOND)
