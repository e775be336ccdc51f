"""Gradients that are cleared while they are copied to the host."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CPUOffloadPolicy
from tests.support.cases import CASES
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads

HOST = CPUOffloadPolicy(pin_memory=False)


def make(case, mesh, **kwargs):
    model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, **kwargs)
    return model


@on_threads(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_first_gradients_on_their_way_are_cleared(set_to_none):
    """A parameter gets its first gradient beside one that has some, and both are cleared."""
    case, mesh = CASES["sometimes_unused"], init_device_mesh("cpu", (2,))
    results = []
    for policy in (meshard.OffloadPolicy(), HOST):
        model, seen = make(case, mesh, offload_policy=policy), []
        for number, used in enumerate([(True, False, False), (True,) * 3, (True,) * 3]):
            model.set_is_last_backward(number != 1)
            case.loss(model(case.batch(number, dist.get_rank()), used)).backward()
            if number == 1:
                model.zero_grad(set_to_none=set_to_none)
            else:
                seen.append(full_grads(model))
        results.append(seen)
    for ours, theirs in zip(*reversed(results), strict=True):
        assert_same(ours, theirs, bitwise=True)


@on_threads(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_gradients_on_their_way_are_cleared(set_to_none, num_before):
    """Clear some gradients while they are on their way; what comes after must not be touched."""
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    results = []
    for policy in (meshard.OffloadPolicy(), HOST):
        model = make(case, mesh, offload_policy=policy)
        some = torch.optim.SGD(list(model.parameters())[::2], lr=0.1)
        seen = []
        for number in range(4):
            model.set_is_last_backward(number < num_before or number == 3)
            case.loss(model(case.batch(number, dist.get_rank()))).backward()
            if number == 2:
                some.zero_grad(set_to_none=set_to_none)
                model.blocks[0].zero_grad(set_to_none=set_to_none)
            if number < num_before or number == 3:
                seen.append(full_grads(model))
        results.append(seen)
    for ours, theirs in zip(*reversed(results), strict=True):
        assert_same(ours, theirs, bitwise=True)
