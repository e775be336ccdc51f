"""How the work of a backward grows with the number of units, counted in calls of Python."""

import sys

import pytest
import torch
from torch import nn

import meshard
from tests.support.ranks import on_fake_ranks


class Nested(nn.Module):
    """A layer, and a module like this one inside it."""

    def __init__(self, depth):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = Nested(depth - 1) if depth > 1 else nn.Identity()

    def forward(self, x):
        return self.inner(self.layer(x))


def units_inside_units(count):
    model = Nested(count)
    for module in reversed([each for each in model.modules() if isinstance(each, Nested)]):
        meshard.fully_shard(module)
    return model


def buckets(count):
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    return meshard.replicate(layers, bucket_cap_mb=1e-5)


def calls_of_a_backward(model):
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += event == "call"

    for _ in range(3):  # buckets are rebuilt after the first
        loss = model(torch.ones(2, 4)).sum()
        num_calls = 0
        sys.setprofile(count)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        model.zero_grad()
    return num_calls


@pytest.mark.parametrize("build", [units_inside_units, buckets])
@on_fake_ranks(2)
def test_a_backward_of_twice_as_many_units_does_not_take_much_more_than_twice(build):
    few, many = (calls_of_a_backward(build(count)) for count in (6, 12))
    assert many < 3 * few, (few, many)
