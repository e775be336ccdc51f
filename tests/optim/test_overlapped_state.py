"""Optimizers in backward: their state is that of the ordinary one."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import meshard
from meshard import OverlappedOptimizer, overlap_optimizer
from tests.support.optimizers import (
    ADAMW,
    OPTIONS,
    assert_same_state,
    groups_of,
    make,
    plain_state,
    train,
    trainable,
)
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["cosine", "one cycle", "plateau", "sequence"])
def test_groups_and_schedulers(name):
    schedulers = {
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            milestones=[2],
        ),
    }
    ours, theirs = make((2,)), make((2,))
    cls, options = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    overlapped = overlap_optimizer(ours, cls, groups_of(ours), **options)
    plain = cls(groups_of(theirs), **options)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        scheduler = schedulers[name](optimizer)
        for number in range(5):
            train(model, optimizer, [number])
            scheduler.step(*([number] if name == "plateau" else []))
    assert overlapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same_state(plain_state(overlapped), plain_state(plain))


@on_ranks(2)
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", ["to ordinary", "from ordinary"])
def test_state_dicts_are_interchangeable(way):
    straight = make((2,))
    train(straight, ADAMW(trainable(straight), **OPTIONS), range(6))
    model = make((2,))
    makers = [
        lambda: overlap_optimizer(model, ADAMW, **OPTIONS),
        lambda: ADAMW(trainable(model), **OPTIONS),
    ]
    first, second = makers if way == "to ordinary" else reversed(makers)
    before = first()
    train(model, before, range(3))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    if isinstance(before, OverlappedOptimizer):
        before.detach()
    after = second()
    after.load_state_dict(torch.load(file, weights_only=False))
    train(model, after, range(3, 6))
    assert_same(full_state(model), full_state(straight), bitwise=True)


def saved(folder, shape, is_overlapped, windows, *, leave=True):
    """Train from the checkpoint of an earlier life, if there is one, and leave one."""
    model = make(shape)
    make_optimizer = (
        overlap_optimizer if is_overlapped else lambda m, cls, **kw: cls(trainable(m), **kw)
    )
    optimizer = make_optimizer(model, ADAMW, **OPTIONS)
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


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("first", [True, False], ids=["overlapped first", "ordinary first"])
def test_killed_and_resumed_with_the_other(run_ranks, tmp_path, first):
    run_ranks(saved, 2, str(tmp_path), (2,), first, (0, 3))
    resumed = run_ranks(saved, 2, str(tmp_path), (2,), not first, (3, 6))
    straight = run_ranks(saved, 2, str(tmp_path / "straight"), (2,), False, (0, 6))
    for ours, theirs in zip(resumed, straight, strict=True):
        assert_same(ours, theirs, bitwise=True)


def saved_elsewhere(folder):
    saved(folder, (2, 2), True, (3, 4))
    resumed = saved(folder, (2, 2), True, (4, 5), leave=False)
    ordinary = saved(folder, (2, 2), False, (3, 5), leave=False)
    assert_same(resumed, ordinary, bitwise=True)


@pytest.mark.extras
@pytest.mark.slow
def test_resumed_on_another_mesh(run_ranks, tmp_path):
    run_ranks(saved, 2, str(tmp_path), (2,), True, (0, 3))
    run_ranks(saved_elsewhere, 4, str(tmp_path))


@on_ranks(2)
def test_edits_between_windows():
    """What users do to the state between two windows counts."""
    ours, theirs = make((2,)), make((2,))
    overlapped = overlap_optimizer(ours, ADAMW, **OPTIONS)
    plain = ADAMW(trainable(theirs), **OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(2))
        first = optimizer.state[model.blocks[0].up.bias]
        first["exp_avg"].mul_(0.5)
        first["exp_avg_sq"] = first["exp_avg_sq"] * 2
        train(model, optimizer, range(2, 3))
        optimizer.state.pop(model.blocks[1].up.weight)
        train(model, optimizer, range(3, 4))
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        meshard.offload(model, optimizer)
        meshard.onload(model, optimizer)
        train(model, optimizer, range(4, 5))
        model.load_state_dict(model.state_dict())
        train(model, optimizer, range(5, 6))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
