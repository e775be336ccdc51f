"""The state of flat optimizers and those in backward is that of the ordinary one."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from meshard import OverlappedOptimizer, flat_optimizer, overlap_optimizer
from tests.optim.optimizers import ADAMW, OPTIONS, make, train, trainable
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_threads

KINDS = {
    "ordinary": lambda model, cls, **options: cls(trainable(model), **options),
    "flat": flat_optimizer,
    "in backward": overlap_optimizer,
    "awaited by gathers": functools.partial(overlap_optimizer, wait="gather"),
}


def straight():
    """Return what six windows of the ordinary optimizer make of a model."""
    model = make((2,))
    train(model, KINDS["ordinary"](model, ADAMW, **OPTIONS), range(6))
    return full_state(model)


@on_threads(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("flat", "ordinary"),
        ("ordinary", "flat"),
        ("flat", "flat"),
        ("in backward", "ordinary"),
        ("ordinary", "in backward"),
        ("awaited by gathers", "flat"),
    ],
)
def test_state_dicts_are_interchangeable(first, second):
    """Train three windows with one, and go on with the other by its state dict."""
    expected = straight()
    model = make((2,))
    before = KINDS[first](model, ADAMW, **OPTIONS)
    train(model, before, range(3))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    if isinstance(before, OverlappedOptimizer):
        before.detach()
    after = KINDS[second](model, ADAMW, **OPTIONS)
    after.load_state_dict(torch.load(file, weights_only=False))
    train(model, after, range(3, 6))
    assert_same(full_state(model), expected, bitwise=True)


def saved(folder, shape, kind, windows, *, leave=True):
    """Train from the checkpoint of an earlier life, if there is one, and leave one."""
    model = make(shape)
    optimizer = KINDS[kind](model, ADAMW, **OPTIONS)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if windows[0]:
        dcp.load(state, checkpoint_id=f"{folder}/{windows[0]}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(*windows))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if leave:
        dcp.save(state, checkpoint_id=f"{folder}/{windows[1]}")
    return full_state(model)


@pytest.mark.extras
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("flat", "ordinary"),
        pytest.param("ordinary", "flat", marks=pytest.mark.slow),
        pytest.param("in backward", "ordinary", marks=pytest.mark.slow),
        pytest.param("ordinary", "in backward", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_with_the_other(run_ranks, tmp_path, first, second):
    run_ranks(saved, 2, str(tmp_path), (2,), first, (0, 3))
    resumed = run_ranks(saved, 2, str(tmp_path), (2,), second, (3, 6), leave=False)
    expected = run_ranks(saved, 2, str(tmp_path), (2,), "ordinary", (0, 6), leave=False)
    assert_same(resumed[0], expected[0], bitwise=True)


def saved_elsewhere(folder):
    saved(folder, (2, 2), "in backward", (3, 4))
    resumed = saved(folder, (2, 2), "in backward", (4, 5), leave=False)
    ordinary = saved(folder, (2, 2), "ordinary", (3, 5), leave=False)
    assert_same(resumed, ordinary, bitwise=True)


@pytest.mark.extras
@pytest.mark.slow
def test_resumed_on_another_mesh(run_ranks, tmp_path):
    run_ranks(saved, 2, str(tmp_path), (2,), "in backward", (0, 3))
    run_ranks(saved_elsewhere, 4, str(tmp_path))


@on_threads(2)
def test_a_copy_of_a_model_goes_on_with_a_copy_of_the_state():
    model = make((2,))
    optimizer = flat_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(2))
    twin = copy.deepcopy(model)
    other = flat_optimizer(twin, ADAMW, **OPTIONS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, steps in ((model, optimizer), (twin, other)):
        train(each, steps, range(2, 5))
    assert_same(full_state(model), full_state(twin), bitwise=True)


@on_threads(2)
def test_steps_that_are_numbers():
    """So torch saved them before 1.12."""
    model = make((2,))
    before = KINDS["ordinary"](model, ADAMW, **OPTIONS)
    train(model, before, range(2))
    state = before.state_dict()
    for each in state["state"].values():
        each["step"] = int(each["step"])
    after = flat_optimizer(model, ADAMW, **OPTIONS)
    after.load_state_dict(state)
    train(model, after, range(2, 6))
    assert_same(full_state(model), straight(), bitwise=True)
