"""Many modules, units and buckets: the work grows with their number, not with its square."""

import copy
import sys

import pytest
import torch
from torch import nn

import meshard
from tests.support.against_plain import check_gradients
from tests.support.models import Made, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_ranks


def python_events(run):
    """Return how many calls and returns of Python and C functions ``run()`` makes."""
    count = 0

    def profile(*_):
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def layers(count):
    return [nn.Linear(2, 2, bias=False) for _ in range(count)]


def units(count):
    return [meshard.fully_shard(layer) for layer in layers(count)]


def sharding(count):
    modules = layers(count)
    return lambda: meshard.fully_shard(modules)


def a_step(count):
    """Of a root around one unit of many layers."""
    model = meshard.fully_shard(nn.Sequential(*meshard.fully_shard(layers(count))))

    def step():
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()

    step()
    step()
    return step


def an_overlapped_optimizer_per_unit(count):
    modules = units(count)
    return lambda: [meshard.overlap_optimizer(each, torch.optim.SGD, lr=0.0) for each in modules]


def a_forward_with_a_list(count):
    model = [
        meshard.fully_shard(
            Made(lambda m, x, found: found.append(m.layer(x)) or found[-1], layer=layer)
        )
        for layer in layers(count)
    ]

    def forward():
        x, found = torch.ones(1, 2), []
        for layer in model:
            x = layer(x, found)

    return forward


def backward_of(model):
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):  # buckets are rebuilt after the first
        model(x).sum().backward()
        model.zero_grad()
    loss = model(x).sum()
    return lambda: (loss.backward(), model)


def a_backward_of_frozen_units(count):
    model = nn.Sequential(*units(count))
    model[: count // 2].requires_grad_(False)
    return backward_of(meshard.fully_shard(model))


def a_backward_of_units_in_one_another(count):
    model = nn.Identity()
    for layer in layers(count // 10):
        model = meshard.fully_shard(nn.Sequential(layer, model))
    return backward_of(model)


def a_backward_of_buckets(count):
    return backward_of(meshard.replicate(nn.Sequential(*layers(count)), bucket_cap_mb=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare",
    [
        sharding,
        a_step,
        an_overlapped_optimizer_per_unit,
        a_forward_with_a_list,
        a_backward_of_frozen_units,
        a_backward_of_units_in_one_another,
        a_backward_of_buckets,
    ],
)
@on_fake_ranks(8)
def test_work_is_linear_in_the_number_of_modules(prepare):
    python_events(prepare(2))  # imports and caches
    assert python_events(prepare(200)) < 5 * python_events(prepare(50))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_edits_between_two_forwards_of_a_list_of_modules_take_effect(reshard_after_forward):
    plain, x = seeded(nn.Sequential(*layers(3))), torch.ones(1, 2)
    model = copy.deepcopy(plain)
    meshard.fully_shard([*model], reshard_after_forward=reshard_after_forward)
    meshard.fully_shard(model)
    check_gradients(model, plain, lambda each, rank: each(x).sum())
    with torch.no_grad():
        model(x)
    for each in (model, plain):
        each[1].weight.requires_grad_(False)
        # Also one that is not the first to run: it finds what the first has installed.
        each[2].weight = nn.Parameter(torch.eye(2))
        each[0].weight = nn.Parameter(2 * torch.eye(2))
    check_gradients(model, plain, lambda each, rank: each(x).sum(), times=1)
    assert_same(model(x), plain(x))
