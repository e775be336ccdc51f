"""Optimizers in backward: when they may step, and what is refused meanwhile."""

import contextlib
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import meshard
from meshard import overlap_optimizer
from tests.support.optimizers import (
    ADAMW,
    OPTIONS,
    SignDescent,
    batch,
    grads,
    make,
    train,
    train_both,
    trainable,
    window,
)
from tests.support.parity import assert_same, full_state, whole
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_attach_and_detach_in_the_middle_of_training():
    straight = make((2,))
    train(straight, ADAMW(trainable(straight), **OPTIONS), range(9))
    model = make((2,))
    plain = ADAMW(trainable(model), **OPTIONS)
    train(model, plain, range(3))
    # The optimizer that there is already: its state is taken over.
    overlapped = overlap_optimizer(model, lambda _: plain)
    scheduler = torch.optim.lr_scheduler.ConstantLR(overlapped, 1.0)
    train(model, overlapped, range(3, 5))
    overlapped.detach()
    window(model, 5)
    assert len(grads(model)) > 10
    scheduler.step()
    overlapped.step()
    overlapped.zero_grad()
    train(model, overlapped, range(6, 7))
    again = overlap_optimizer(model, ADAMW, **OPTIONS)
    again.load_state_dict(overlapped.state_dict())
    train(model, again, range(7, 9))
    assert_same(full_state(model), full_state(straight), bitwise=True)


@on_ranks(2)
@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (ADAMW, {}),
        (SignDescent, {}),  # not pointwise
        (ADAMW, {"wait": "gather"}),
        (ADAMW, {"clip": "deferred", "max_norm": 1e-3}),
    ],
)
def test_after_detach_gradients_stay(cls, kwargs):
    """``step`` leaves them, and the next backward adds to them, as with an ordinary optimizer."""
    ours, theirs = make((2,)), make((2,))
    options = {"lr": 0.05}
    overlapped = overlap_optimizer(ours, cls, **options, **kwargs)
    plain = cls(trainable(theirs), **options)
    overlapped.detach()
    for number in range(3):  # without zero_grad()
        for model, optimizer in ((ours, overlapped), (theirs, plain)):
            window(model, number)
            before = [param.grad for param in trainable(model)]
            optimizer.step()
            assert all(p.grad is g for p, g in zip(trainable(model), before, strict=True))
        assert len(grads(ours)) > 10
        assert_same(grads(ours), grads(theirs), bitwise=True)
        assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_attach_and_detach_in_the_middle_of_a_window():
    """Attached after some microbatches, and detached after some."""
    ours, theirs = make((2,)), make((2,))
    plain, other = ADAMW(trainable(ours), **OPTIONS), ADAMW(trainable(theirs), **OPTIONS)
    for model in (ours, theirs):
        window(model, 0, "R")
        window(model, 1, "N")
    overlapped = overlap_optimizer(ours, lambda _: plain)
    for model, optimizer in ((ours, overlapped), (theirs, other)):
        window(model, 2, "F")
        optimizer.step()
        optimizer.zero_grad()
        window(model, 3, "N")
    overlapped.detach()
    for model, optimizer in ((ours, overlapped), (theirs, other)):
        window(model, 4, "F")
        optimizer.step()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_two_optimizers_share_a_unit():
    """Matrices by one optimizer, all else by another."""
    ours, theirs = make((2,)), make((2,))
    made = {}
    for model in (ours, theirs):
        matrices = [param for param in trainable(model) if param.dim() == 2]
        rest = [param for param in trainable(model) if param.dim() != 2]
        made[model] = matrices, rest
    matrices, rest = made[ours]
    pair = [
        overlap_optimizer(ours, torch.optim.SGD, matrices, lr=0.01),
        overlap_optimizer(ours, ADAMW, rest, **OPTIONS),
    ]
    with pytest.raises(ValueError, match="by another optimizer of overlap_optimizer"):
        overlap_optimizer(ours, ADAMW)
    plain = [
        torch.optim.SGD(made[theirs][0], lr=0.01),
        ADAMW(made[theirs][1], **OPTIONS),
    ]
    for model, optimizers in ((ours, pair), (theirs, plain)):
        for number in range(4):
            window(model, number, "RF")
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    # Half by one in backward, and half by an ordinary one.
    pair[1].detach()
    ordinary = ADAMW(rest, **OPTIONS)
    window(ours, 5)
    assert all(param.grad is None for param in matrices)
    assert all(param.grad is not None for param in rest[:3])
    ordinary.step()


@on_ranks(2)
def test_any_other_optimizer():
    train_both(lambda: make((2,)), SignDescent, {"lr": 0.01}, schedule="RF")


# --- clipping ------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "limits",
    [{"max_unit_norm": 0.1}, {"clip_value": 0.01}, {"clip_value": 0.05, "max_unit_norm": 0.1}],
    ids=str,
)
def test_clipping_of_each_unit(limits):
    ours, theirs = make((2,)), make((2,))
    overlapped = overlap_optimizer(ours, ADAMW, **OPTIONS, **limits)
    plain = ADAMW(trainable(theirs), **OPTIONS)
    for number in range(4):
        window(ours, number, "RF")
        overlapped.step()
        window(theirs, number, "RF")
        for unit in (*theirs.blocks, theirs):
            own = list(unit.parameters())
            if unit is theirs:
                inside = {id(p) for block in theirs.blocks for p in block.parameters()}
                own = [param for param in own if id(param) not in inside]
            if "clip_value" in limits:
                nn.utils.clip_grad_value_(own, limits["clip_value"])
            if "max_unit_norm" in limits:
                before = meshard.clip_grad_norm_(own, limits["max_unit_norm"])
                assert before > limits["max_unit_norm"] or number
        plain.step()
        plain.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


# --- errors --------------------------------------------------------------------------------


def refused():
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    before = full_state(model)
    scaler = meshard.ShardedGradScaler("cpu", init_scale=8.0)
    with pytest.raises(RuntimeError, match=r"overlap_optimizer.*bfloat16.*detach\(\)"):
        scaler.scale(model(batch(0)).sum()).backward()
    model.reset_iter_state()
    assert_same(full_state(model), before, bitwise=True)
    with pytest.raises(RuntimeError, match=r"max_unit_norm=.*clip_value=.*deferred.*detach\(\)"):
        meshard.clip_grad_norm_(model, 1.0)
    # What is pending would be missed.
    window(model, 1, "N")
    with pytest.raises(RuntimeError, match="not reduced yet"):
        optimizer.step()
    optimizer.zero_grad()
    assert not meshard.pending_gradients(model)
    optimizer.step()
    assert_same(full_state(model), before, bitwise=True)
    for what in (optimizer.detach, lambda: overlap_optimizer(model, ADAMW)):
        handle = model.blocks[1].register_forward_hook(lambda *_, what=what: what())
        with pytest.raises(RuntimeError, match="inside the forward or backward of unit"):
            model(batch(0))
        handle.remove()
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(optimizer, io.BytesIO())
    optimizer.detach()
    meshard.clip_grad_norm_(model, 1.0)
    with pytest.raises(ValueError, match=r"shape \(3,\) in param group 0 is in no unit"):
        overlap_optimizer(model, ADAMW, [nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="must be a positive, finite number"):
        overlap_optimizer(model, ADAMW, max_unit_norm=0.0)
    with pytest.raises(TypeError, match="LBFGS"):
        overlap_optimizer(model, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="got a dict"):
        overlap_optimizer(model, lambda params: {})
    with pytest.raises(ValueError, match="no unit in this Linear"):
        overlap_optimizer(nn.Linear(2, 2), ADAMW)


def test_errors_come_before_anything_is_touched(run_ranks):
    run_ranks(refused, 2)


@on_ranks(2)
def test_a_backward_that_fails():
    """After a backward that has raised, the next window is a window like any other."""
    ours, theirs = make((2,)), make((2,))
    overlapped = overlap_optimizer(ours, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(trainable(theirs), lr=0.1)
    train(ours, overlapped, range(1))
    state = full_state(ours)

    def fail(*_):
        raise ValueError("on purpose")

    hook = ours.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        window(ours, 1)
    hook.remove()
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        overlapped.step()
    ours.load_state_dict(state, strict=False)  # tied weights are there under one name
    train(theirs, plain, range(1))
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(2, 4))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_a_deleted_model_is_gone():
    """Nothing keeps a model alive, and a model keeps its optimizer."""
    gc.collect()
    gc.disable()
    try:
        model = make((2,))
        overlap_optimizer(model, ADAMW)
        before = whole(model.first.weight)
        window(model, 0)
        assert not torch.equal(whole(model.first.weight), before)
        model.zero_grad()
        optimizer = overlap_optimizer(make((2,)), ADAMW)
        assert all(unit() is None for unit in [weakref.ref(u) for u in optimizer._units])
        module, alive = weakref.ref(model), weakref.ref(model.first.weight)
        del model
        assert module() is None and alive() is None
    finally:
        gc.enable()
        with contextlib.suppress(Exception):
            gc.collect()
