"""Parameters and their state, where torch's own fully_shard is wrong about them.

Each runs with both libraries: see ``tests.peers.both``.
"""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.peers.both import BATCHES, Both, mesh_of
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads

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
    lib.fully_shard(layer, mesh=mesh_of(2))
    layer(torch.ones(1, 4, 5, 5)).sum().backward()
    return "works"


def hooked(lib):
    both = Both(lib)
    for model in both.pair:
        model.scale.register_hook(lambda grad: 3 * grad)
    return both.is_right()


NUM_RANKS = 2
# What is done with a library, and what every rank has then with ours: of an exception, its class.
SITUATIONS = [
    (frozen_between_steps, ("right", "right")),
    (frozen_while_whole, ("right", "right")),
    (thawed_under_mixed_precision, ("right", "right")),
    (frozen_under_mixed_precision, "right"),
    (averages_swapped_in_after_an_evaluation, "right"),
    (stepped_after_an_evaluation, "right"),
    (initialised_after_an_evaluation, "right"),
    (an_optimizer_built_after_an_evaluation, "right"),
    (a_part_first, ("right", "right")),
    (inference_first, "right"),
    (copied, "right"),
    (averaged, "right"),
    (loaded_from_whole_tensors, "right"),
    (assigned_from_whole_tensors, "right"),
    (parameter_assigned, "right"),
    (part_cast, "right"),
    (cast_after_an_evaluation, "right"),
    (cast_and_cast_back_after_an_evaluation, "right"),
    (channels_last, "works"),
    (hooked, "right"),
]
