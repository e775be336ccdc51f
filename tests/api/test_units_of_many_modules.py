"""Units of many modules: the work grows with the number of modules, not with its square."""

import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
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


@on_fake_ranks(8)
def test_sharding_a_list_of_modules_is_linear_in_its_length():
    mesh = init_device_mesh("cpu", (8,))

    def events(num_modules):
        modules = [nn.Linear(2, 2, bias=False) for _ in range(num_modules)]
        return python_events(lambda: meshard.fully_shard(modules, mesh))

    events(2)  # imports and caches
    assert events(200) < 5 * events(50)


def a_list_of(num_modules, mesh):
    """Return a root around one unit of many layers."""
    modules = [nn.Linear(2, 2, bias=False) for _ in range(num_modules)]
    meshard.fully_shard(modules, mesh)
    return meshard.fully_shard(nn.Sequential(*modules), mesh)


@on_fake_ranks(8)
def test_a_step_of_a_list_of_modules_is_linear_in_its_length():
    mesh = init_device_mesh("cpu", (8,))

    def events(num_modules):
        model = a_list_of(num_modules, mesh)

        def step():
            model(torch.ones(1, 2)).sum().backward()
            model.zero_grad()

        step()
        step()
        return python_events(step)

    assert events(200) < 5 * events(50)


@on_fake_ranks(8)
@pytest.mark.parametrize("case", ["overlap_optimizer", "list", "frozen"])
def test_what_is_done_per_unit_is_linear_in_their_number(case):
    mesh = init_device_mesh("cpu", (8,))

    def events(count):
        return python_events(LOOK_UPS[case](mesh, count))

    events(2)  # imports and caches
    assert events(200) < 5 * events(50)


def units(count, mesh, make=lambda: nn.Linear(2, 2, bias=False)):
    return [meshard.fully_shard(make(), mesh) for _ in range(count)]


def overlapped_per_unit(mesh, count):
    layers = units(count, mesh)
    optim = torch.optim.SGD
    return lambda: [meshard.overlap_optimizer(each, optim, lr=0.0) for each in layers]


class Appending(nn.Linear):
    def forward(self, x, found):
        found.append(super().forward(x))
        return found[-1]


def forward_with_a_list(mesh, count):
    model = nn.ModuleList(units(count, mesh, lambda: Appending(2, 2, bias=False)))

    def forward():
        x, found = torch.ones(1, 2), []
        for layer in model:
            x = layer(x, found)
        return x

    return forward


def backward_of_frozen(mesh, count):
    model = nn.Sequential(*units(count, mesh))
    for layer in model[: count // 2]:
        layer.requires_grad_(False)
    meshard.fully_shard(model, mesh)
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    return lambda: (loss.backward(), model)


LOOK_UPS = {
    "overlap_optimizer": overlapped_per_unit,
    "list": forward_with_a_list,
    "frozen": backward_of_frozen,
}


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_edits_between_two_forwards_of_a_list_of_modules_take_effect(reshard_after_forward):
    modules = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    meshard.fully_shard(modules, reshard_after_forward=reshard_after_forward)
    model = meshard.fully_shard(nn.Sequential(*modules))
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()

    with torch.no_grad():
        model(torch.ones(1, 4))
    modules[1].weight.requires_grad_(False)
    # Also one that is not the first to run: it finds what the first has installed.
    modules[2].weight = nn.Parameter(torch.eye(4))
    modules[0].weight = nn.Parameter(2 * torch.eye(4))
    y = model(torch.ones(1, 4))
    y.sum().backward()

    expected = 2 * torch.ones(1, 4) @ modules[1].weight.full_tensor().T
    torch.testing.assert_close(y.detach(), expected)
    assert modules[1].weight.grad is None
    assert modules[0].weight.grad is not None and modules[2].weight.grad is not None
