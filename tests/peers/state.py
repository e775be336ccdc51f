"""Parameters and their state, where torch's own fully_shard is wrong about them."""

import torch

from tests.peers.both import Both, batch, situation
from tests.support.models import MlpStack
from tests.support.parity import assert_same, full_grads

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def freeze(model, flag=False):
    model.blocks[1].requires_grad_(flag)
    model.scale.requires_grad_(flag)


def after(change, lib, *, evaluates=False):
    """Say whether both are right after a change, maybe of what an evaluation has left."""
    both = Both(lib)
    if evaluates:
        both.forward()
    for model in both.pair:
        change(model)
    return both.is_right()


@situation(("right", "right"))
def frozen_between_steps(lib):
    both = Both(lib)
    both.is_right()
    both.each(freeze)
    first = both.is_right()
    both.each(lambda model: freeze(model, True))
    return first, both.is_right()


@situation(("right", "right"))
def frozen_while_whole(lib):
    """A forward has left all of them whole."""
    both = Both(lib, reshard_after_forward=False)
    both.forward()
    both.each(freeze)
    first = both.is_right()
    both.forward()
    both.each(lambda model: freeze(model, True))
    return first, both.is_right()


@situation(("right", "right"))
def thawed_under_mixed_precision(lib):
    plain = MlpStack()
    freeze(plain)
    both = Both(lib, plain, policy=MIXED)
    first = both.is_right()
    both.each(lambda model: freeze(model, True))
    return first, both.is_right()


@situation("right")
def frozen_under_mixed_precision(lib):
    both = Both(lib, policy=MIXED)
    both.is_right()
    both.each(freeze)
    return both.is_right()


@situation(("right", "right"))
def a_part_first(lib):
    """A submodule is evaluated by itself, then the whole is trained."""
    both = Both(lib)
    with torch.no_grad():
        both.model.blocks[1](batch()[0])
    first = both.is_right()
    both.model.blocks[0](batch()[0]).sum().backward()  # and trained by itself
    return first, both.is_right()


@situation("right")
def part_cast(lib):
    """A child is cast and cast back, which rounds its values."""
    return after(lambda model: model.blocks[1].up.bfloat16().float(), lib, evaluates=True)


@situation("right")
def cast_after_an_evaluation(lib):
    both = Both(lib)
    both.forward()
    for model in both.pair:
        model.double()
        model(batch()[0].double()).sum().backward()
    assert_same(full_grads(both.model), full_grads(both.plain), torch.float64)
    return "right"


@situation("right")
def cast_and_cast_back_after_an_evaluation(lib):
    return after(lambda model: model.bfloat16().float(), lib, evaluates=True)


@situation("right")
def hooked(lib):
    return after(lambda model: model.scale.register_hook(lambda grad: 3 * grad), lib)
