"""The state of local optimizers and those in backward is that of the ordinary one."""

import functools
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from meshard import local_optimizer, overlap_optimizer
from tests.optim.optimizers import ADAMW, OPTIONS, make, train, trainable
from tests.support.parity import assert_same, full_state, whole
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import slow, spread

KINDS = {
    "ordinary": lambda model, cls, **options: cls(trainable(model), **options),
    "local": local_optimizer,
    "in backward": overlap_optimizer,
    "awaited by gathers": functools.partial(overlap_optimizer, wait="gather"),
}


def straight():
    """Return what six windows of the ordinary optimizer make of a model."""
    model = make()
    train(model, KINDS["ordinary"](model, ADAMW, **OPTIONS), range(6))
    return full_state(model)


@pytest.mark.slow
@on_threads(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("local", "ordinary"),
        ("ordinary", "local"),
        ("local", "local"),
        ("in backward", "ordinary"),
        ("ordinary", "in backward"),
        ("awaited by gathers", "local"),
    ],
)
def test_state_dicts_are_interchangeable(first, second):
    expected = straight()
    model = make()
    before = KINDS[first](model, ADAMW, **OPTIONS)
    train(model, before, range(3))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    values = full_state(model)
    model = make()
    model.load_state_dict(values, strict=False)  # tied weights are there under one name
    after = KINDS[second](model, ADAMW, **OPTIONS)
    after.load_state_dict(torch.load(file, weights_only=False))
    train(model, after, range(3, 6))
    assert_same(full_state(model), expected, bitwise=True)


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def unshard(own):
    own.update((key, whole(each).clone()) for key, each in own.items())


def count_in_numbers(own):
    """As torch saved steps before 1.12."""
    own["step"] = int(own["step"])


@on_threads(2)
@spread(kind=["local", "in backward", "awaited by gathers"], change=[unshard, count_in_numbers])
def test_a_state_of_unsharded_tensors_or_of_an_old_torch_is_loaded(change, kind):
    model = make()
    optimizer = KINDS["ordinary"](model, ADAMW, **OPTIONS)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    for own in state["state"].values():
        change(own)
    second = KINDS[kind](model, ADAMW, **OPTIONS)
    second.load_state_dict(state)
    train(model, second, range(3, 6))
    assert_same(full_state(model), straight(), bitwise=True)


@pytest.mark.extras
@on_ranks(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("local", "in backward"),
        slow("ordinary", "local"),
        slow("in backward", "ordinary"),
    ],
)
def test_resumed_from_a_checkpoint_of_torch_with_the_other(tmp_path, first, second):
    model = make()
    optimizer = KINDS[first](model, ADAMW, **OPTIONS)
    train(model, optimizer, range(3))
    dcp.save(state_of(model, optimizer), checkpoint_id=str(tmp_path))
    model = make()
    optimizer = KINDS[second](model, ADAMW, **OPTIONS)
    state = state_of(model, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # what is unused has no state
    dcp.load(state, checkpoint_id=str(tmp_path), planner=planner)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(3, 6))
    assert_same(full_state(model), straight(), bitwise=True)
