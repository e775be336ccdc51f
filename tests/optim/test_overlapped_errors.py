"""Optimizers in backward: errors about scaling, late gradients and dropped optimizers."""

import gc
import weakref

import pytest
import torch

import meshard
from meshard import OverlappedOptimizer, overlap_optimizer
from tests.support.optimizers import (
    ADAMW,
    DEFERRED,
    MAX_NORM,
    OPTIONS,
    batch,
    grads,
    make,
    train,
    trainable,
    window,
)
from tests.support.parity import assert_same, full_state, whole
from tests.support.ranks import on_ranks


def scaled():
    """Only the model that is stepped in backward must not have its loss scaled."""
    ours, other = make((2,)), make((2,))
    overlapped, plain = overlap_optimizer(ours, ADAMW, **OPTIONS), ADAMW(trainable(other))
    before, others = full_state(ours), full_state(other)
    scaler = meshard.ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(other(batch(0)).sum()).backward()
    scaler.step(plain)
    scaler.update()
    assert not torch.equal(whole(other.first.weight), others["first.weight"])
    for losses in (scaler.scale([ours(batch(0)).sum()])[0], scaler.scale(ours(batch(0)).sum())):
        with pytest.raises(RuntimeError, match=r"steps unit .* could be unscaled .*detach\(\)"):
            losses.backward()
        ours.reset_iter_state()
    assert_same(full_state(ours), before, bitwise=True)
    # What failed is over, and a backward of another loss is not taken for one of a scaled loss.
    train(ours, overlapped, range(1))
    assert not torch.equal(whole(ours.first.weight), before["first.weight"])
    overlapped.detach()
    scaler.scale(ours(batch(0)).sum()).backward()
    scaler.step(overlapped)


def test_a_scaled_loss(run_ranks):
    run_ranks(scaled, 2)


@on_ranks(2)
def test_the_scaler_of_torch():
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(batch(0)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler cannot be used .*bfloat16.*detach\(\)"):
        scaler.step(optimizer)
    optimizer.detach()
    scaler.scale(model(batch(0)).sum()).backward()
    scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    overlapped = overlap_optimizer(model, ADAMW, **OPTIONS)
    off.scale(model(batch(0)).sum()).backward()
    off.step(overlapped)


def late():
    """Whoever ends a window in the middle of a backward hears of the gradients that follow."""
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    handle = model.blocks[2].register_full_backward_hook(
        lambda *_: meshard.finalize_gradients(model)
    )
    with pytest.raises(RuntimeError, match=r"unit 'blocks.\d' has got a gradient after its optim"):
        window(model, 0)
    handle.remove()
    train(model, optimizer, range(1, 3))


def test_a_gradient_that_comes_after_the_step(run_ranks):
    run_ranks(late, 2)


@on_ranks(2)
def test_a_gradient_that_comes_while_the_rest_is_reduced():
    """So does who uses a weight outside of the forward, also before the first part is reduced."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    model[0].requires_grad_(False)
    overlap_optimizer(model, ADAMW, **OPTIONS)
    model[1].unshard()
    penalty = model[1].weight.sum()  # its backward runs last
    loss = model(torch.ones(1, 4, requires_grad=True)).sum() + penalty
    with pytest.raises(RuntimeError, match=r"unit '1' has got a gradient after its optimizer"):
        loss.backward()


@on_ranks(2)
def test_an_optimizer_that_nobody_holds():
    """The units keep it, and it can be found again."""
    model = make((2,))
    overlap_optimizer(model, ADAMW, trainable(model)[:3], **OPTIONS)
    gc.collect()
    before = whole(model.first.weight)
    window(model, 0)
    assert not torch.equal(whole(model.first.weight), before)
    with pytest.raises(ValueError, match=r"attached_to\(module\)"):
        overlap_optimizer(model, ADAMW)
    (found,) = OverlappedOptimizer.attached_to(model)
    second = overlap_optimizer(model, ADAMW, trainable(model)[3:], **OPTIONS)
    assert OverlappedOptimizer.attached_to(model) == [found, second]
    assert OverlappedOptimizer.attached_to(torch.nn.Linear(1, 1)) == []
    found.detach()
    second.detach()
    assert OverlappedOptimizer.attached_to(model) == []
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None


@on_ranks(2)
def test_detach_with_steps_put_off():
    """``detach`` takes the steps that wait for the next forward, and leaves what is pending."""
    ours, theirs = make((2,)), make((2,))
    late, plain = (
        overlap_optimizer(ours, ADAMW, wait="gather", **OPTIONS, **DEFERRED),
        ADAMW(trainable(theirs), **OPTIONS),
    )
    for number in range(2):
        window(ours, number)
        late.step()
        window(theirs, number)
        meshard.clip_grad_norm_(theirs, MAX_NORM)
        plain.step()
        plain.zero_grad()
    late.detach()
    assert grads(ours) == []
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    again = overlap_optimizer(ours, ADAMW, **OPTIONS, **DEFERRED)
    again.load_state_dict(late.state_dict())
    for model in (ours, theirs):
        window(model, 3, "N")
    again.detach()
    assert meshard.pending_gradients(ours)
    for model, optimizer in ((ours, again), (theirs, plain)):
        window(model, 4)
        assert len(grads(model)) > 10
        optimizer.step()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_going_back_with_frozen_parameters():
    """To go back takes the parameters of before, not those that are trained by then."""
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(2))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.detach()
    model.blocks[0].requires_grad_(False)
    other = overlap_optimizer(model, ADAMW, **OPTIONS)
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict(optimizer.state_dict())
    other.detach()
    again = overlap_optimizer(model, ADAMW, params, **OPTIONS)
    again.load_state_dict(optimizer.state_dict())
    before = full_state(model)
    train(model, again, range(2, 4))
    after = full_state(model)
    assert torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
    assert not torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])
