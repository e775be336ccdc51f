"""Parameters and their state, where torch's own fully_shard is wrong about them.

The peer runs beside us: see ``tests.support.side_by_side``.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.side_by_side import (
    BATCHES,
    Both,
    assert_row,
    parametrize_rows,
    run_both,
    run_ours,
)
from tests.support.torch_versions import Changed

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def freeze(model, flag=False):
    model.blocks[1].requires_grad_(flag)
    model.scale.requires_grad_(flag)


def frozen_between_steps(lib):
    both = Both(lib)
    both.is_right()
    both.each(freeze)
    first = both.is_right()
    both.each(lambda model: freeze(model, True))
    return first, both.is_right()


def frozen_while_whole(lib):
    """A forward has left all of them whole."""
    both = Both(lib, reshard_after_forward=False)
    both.forward()
    both.each(freeze)
    first = both.is_right()
    both.forward()
    both.each(lambda model: freeze(model, True))
    return first, both.is_right()


def thawed_under_mixed_precision(lib):
    both = Both(lib, freeze, MIXED)
    first = both.is_right()
    both.each(lambda model: freeze(model, True))
    return first, both.is_right()


def frozen_under_mixed_precision(lib):
    both = Both(lib, policy=MIXED)
    both.is_right()
    both.each(freeze)
    return both.is_right()


def averages_swapped_in_after_an_evaluation(lib):
    both = Both(lib)
    both.is_right()
    both.forward()
    both.each(lambda model: [param.data.mul_(0.5) for param in model.parameters()])
    ours, theirs = both.forward()
    return "right" if torch.allclose(ours, theirs, atol=1e-5) else "stale"


def stepped_after_an_evaluation(lib):
    both = Both(lib)
    both.backward()
    both.forward()
    both.each(lambda model: torch.optim.SGD(model.parameters(), lr=0.5, foreach=True).step())
    ours, theirs = both.forward()
    return "right" if torch.allclose(ours, theirs, atol=1e-5) else "stale"


def initialised_after_an_evaluation(lib):
    both = Both(lib)
    both.forward()
    both.each(lambda model: nn.init.constant_(model.scale, 0.5))
    return both.is_right()


def an_optimizer_built_after_an_evaluation(lib):
    both = Both(lib)
    both.forward()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in both.pair]
    both.backward()
    for optimizer in optimizers:
        optimizer.step()
    return both.is_right()


def a_part_first(lib):
    """A submodule is evaluated by itself, then the whole is trained."""
    both = Both(lib)
    with torch.no_grad():
        both.model.blocks[1](BATCHES[0])
    first = both.is_right()
    both.model.blocks[0](BATCHES[0]).sum().backward()  # and trained by itself
    return first, both.is_right()


def inference_first(lib):
    both = Both(lib)
    with torch.inference_mode():
        both.model(BATCHES[0])
    return both.is_right()


def copied(lib):
    both = Both(lib)
    both.model = copy.deepcopy(both.model)
    return both.is_right()


def averaged(lib):
    both = Both(lib)
    averages = [AveragedModel(model) for model in both.pair]
    for average, model in zip(averages, both.pair, strict=True):
        average.update_parameters(model)
    both.model, both.plain = (average.module for average in averages)
    return both.is_right()


def loaded_from_whole_tensors(lib):
    both = Both(lib)
    state = seeded(MlpStack(), 5).state_dict()
    both.each(lambda model: model.load_state_dict(state))
    return both.is_right()


def assigned_from_whole_tensors(lib):
    both = Both(lib)
    for model in both.pair:
        model.load_state_dict(seeded(MlpStack(), 5).state_dict(), assign=True)
    return both.is_right()


def parameter_assigned(lib):
    both = Both(lib)
    both.forward()
    for model in both.pair:
        model.blocks[1].up.weight = nn.Parameter(torch.full((10, 6), 0.1))
    return both.is_right()


def part_cast(lib):
    """A child is cast and cast back, which rounds its values."""
    both = Both(lib)
    both.forward()
    for model in both.pair:
        model.blocks[1].up.bfloat16()
        model.blocks[1].up.float()
    return both.is_right()


def cast_after_an_evaluation(lib):
    both = Both(lib)
    both.forward()
    for model in both.pair:
        model.double()
        model(BATCHES[0].double()).sum().backward()
    assert_same(full_grads(both.model), full_grads(both.plain), torch.float64)
    return "right"


def cast_and_cast_back_after_an_evaluation(lib):
    both = Both(lib)
    both.forward()
    for model in both.pair:
        model.bfloat16()
        model.float()
    return both.is_right()


def channels_last(lib):
    layer = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    lib.fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    layer(torch.ones(1, 4, 5, 5)).sum().backward()
    return "works"


def hooked(lib):
    both = Both(lib)
    for model in both.pair:
        model.scale.register_hook(lambda grad: 3 * grad)
    return both.is_right()


# what is done, what torch's fully_shard gives, what we give
THAWED = Changed("RuntimeError", {"2.14": ("wrong", "wrong")})
ROWS = [
    (frozen_between_steps, ("wrong", "wrong"), ("right", "right")),
    (frozen_while_whole, ("wrong", "wrong"), ("right", "right")),
    (thawed_under_mixed_precision, THAWED, ("right", "right")),
    (frozen_under_mixed_precision, "wrong", "right"),
    (averages_swapped_in_after_an_evaluation, "right", "right"),
    (stepped_after_an_evaluation, "stale", "right"),
    (initialised_after_an_evaluation, "wrong", "right"),
    (an_optimizer_built_after_an_evaluation, "wrong", "right"),
    (a_part_first, "RuntimeError", ("right", "right")),
    (inference_first, "RuntimeError", "right"),
    (copied, "AssertionError", "right"),
    (averaged, "AssertionError", "right"),
    (loaded_from_whole_tensors, "RuntimeError", "right"),
    (assigned_from_whole_tensors, "AttributeError", "right"),
    (parameter_assigned, "wrong", "right"),
    (part_cast, "wrong", "right"),
    (cast_after_an_evaluation, "RuntimeError", "right"),
    (cast_and_cast_back_after_an_evaluation, "wrong", "right"),
    (channels_last, "NotImplementedError", "works"),
    (hooked, "wrong", "right"),
]


@pytest.mark.slow
def test_we_are_right(run_ranks):
    found = run_ranks(run_ours, 2, [row for row, _, _ in ROWS])
    assert found == [[ours for _, _, ours in ROWS]] * 2


@pytest.mark.slow
@parametrize_rows(ROWS)
def test_the_peer_beside_us(run_ranks, row, peer, ours):
    assert_row(run_ranks(run_both, 2, row), peer, ours)
