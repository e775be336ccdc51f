"""Optimizers in backward: one step of a unit per window."""

import pytest

import meshard
from meshard import GradientSync, overlap_optimizer
from tests.support.optimizers import (
    ADAMW,
    OPTIONS,
    SYNC,
    Net,
    batch,
    grads,
    make,
    train_both,
    trainable,
)
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.slow
def test_every_way_through_a_unit():
    for kwargs in ({"reshard_after_forward": False}, {"reshard_after_forward": True}):
        train_both(lambda kwargs=kwargs: make((2,), **kwargs), ADAMW, OPTIONS)

    def kept_in_backward():
        model = make((2,))
        model.set_reshard_after_backward(False)
        return model

    train_both(kept_in_backward, ADAMW, OPTIONS)
    train_both(lambda: make((2,), model=Net(use_reentrant=True)), ADAMW, OPTIONS, schedule="RF")
    # A block that rests in the last microbatch is stepped by what it got before.
    for schedule in ("F", "FFF", "NRF"):
        train_both(lambda: make((2,)), ADAMW, OPTIONS, schedule=schedule, rest=True)


class Rests(Net):
    """``rest``: a number of microbatches after which the last block is not used any more."""

    calls = 0

    def forward(self, x, rest=None):
        self.calls += 1
        return super().forward(x, rest=self.calls % 3 == 0)


@on_ranks(2)
@pytest.mark.slow
def test_a_unit_that_rests_in_the_last_microbatch():
    for schedule in ("FFF", "NNF", "RRF"):
        train_both(lambda: make((2,), model=Rests()), ADAMW, OPTIONS, schedule=schedule)


@on_ranks(2)
def test_finalizing_ends_a_window():
    ours, theirs = make((2,)), make((2,))
    overlapped = overlap_optimizer(ours, ADAMW, **OPTIONS)
    plain = ADAMW(trainable(theirs), **OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        for number, (schedule, is_last) in enumerate([("NN", True), ("RR", False), ("FF", False)]):
            model.set_is_last_backward(is_last)
            for place, letter in enumerate(schedule):
                model.set_gradient_sync(SYNC[letter])
                model(batch(10 * number + place)).square().sum().backward()
            meshard.finalize_gradients(model)
            if model is ours:
                assert grads(model) == []
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_microbatches():
    ours, theirs = make((2,)), make((2,))
    overlapped = overlap_optimizer(ours, ADAMW, **OPTIONS)
    plain = ADAMW(trainable(theirs), **OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        for until_last in GradientSync:
            for part in meshard.microbatches(
                model, [batch(1), batch(2), batch(3)], until_last=until_last
            ):
                model(part).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_a_closure():
    model, other = make((2,)), make((2,))
    overlapped, plain = overlap_optimizer(model, ADAMW), ADAMW(trainable(other))
    losses = []
    for each, optimizer in ((model, overlapped), (other, plain)):

        def closure(each=each, optimizer=optimizer):
            optimizer.zero_grad()
            loss = each(batch(1)).square().sum()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses[0] == losses[1]
    assert_same(full_state(model), full_state(other), bitwise=True)
