"""Optimizers in backward free gradients as docs/how-to/optimizer-overlap.md says, to the byte."""

import contextlib
import functools
import gc
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import meshard
from meshard import overlap_optimizer
from tests.support.models import seeded
from tests.support.parity import assert_same, full_state
from tests.support.rank_pool import RankError
from tests.support.ranks import on_ranks
from tests.support.strategies import MODES

WIDTH, UNITS = 128, 8
UNIT = WIDTH * WIDTH * 4  # bytes of a unit, and on one rank of its gradient
COUNT = 4  # bytes behind a reduced gradient: whether the parameter was used
ROW = WIDTH * 4  # bytes of the gradient of an activation; what is smaller is a number
# Optimizers that take nothing for the time of their step.
IN_PLACE = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}


def on_one_rank(test):
    """Three tries: torch's profiler loses allocation events, and a defect would be there each time.

    Measured: 15 of 2088 recordings of one backward lacked two or three events of one node, with the
    same code as all others and with the right tensors alive before and after.
    """
    run = on_ranks(1)(test)

    @functools.wraps(run)
    def try_again(*args, **kwargs):
        for tries_left in (2, 1, 0):
            try:
                return run(*args, **kwargs)
            except RankError as error:
                if not tries_left or "AssertionError" not in str(error):
                    raise
        return None

    return try_again


@contextlib.contextmanager
def recorded():
    """Record allocations of CPU memory inside, of at least a row: the peak, and what is left.

    No garbage is collected meanwhile: what earlier tests have left would be taken for ours.
    """
    found = SimpleNamespace()
    gc.collect()
    gc.disable()
    try:
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            yield found
    finally:
        gc.enable()
    changes = [
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    live = list(accumulate((each for each in changes if abs(each) >= ROW), initial=0))
    found.peak, found.left = max(live), live[-1]


def make():
    """One rank: what a collective would take for itself is not there, and numbers are exact."""
    model = seeded(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))))
    for layer in (*model, model):
        meshard.fully_shard(layer)
    return model


def ordinary(model, cls, **options):
    return cls(model.parameters(), **options)


def step(model, optimizer, schedule):
    """Run a window; return what its last backward, and then the step, has allocated."""
    for place in range(len(schedule)):
        is_last = place == len(schedule) - 1
        model.set_is_last_backward(is_last)
        model.set_gradient_sync(MODES[schedule[place]])
        loss = model(torch.full((1, WIDTH), 0.1 + place)).sum()
        if not is_last:
            loss.backward()
    with recorded() as in_backward:
        loss.backward()
    with recorded() as in_step:
        optimizer.step()
    optimizer.zero_grad()
    return in_backward, in_step


def both(cls, options):
    found = []
    for make_optimizer in (overlap_optimizer, ordinary):
        model = make()
        optimizer = make_optimizer(model, cls, **options)
        for _ in range(2):  # the first step makes the state
            step(model, optimizer, "F")
        found.append((*step(model, optimizer, "F"), full_state(model)))
    assert_same(found[0][2], found[1][2], bitwise=True)
    return found[0][:2], found[1][:2]


@on_one_rank
@pytest.mark.parametrize("name", IN_PLACE)
def test_no_gradient_is_left_and_one_is_alive_at_the_peak(name):
    cls, options = IN_PLACE[name]
    (backward, later), (plain_backward, plain_later) = both(cls, options)
    # Of all gradients, those of the units reduced before are alive: none here but all there.
    assert backward.left == 0
    assert plain_backward.left == UNITS * (UNIT + COUNT)
    assert plain_later.peak == later.peak == 0
    # The last unit: its gradient, beside its weight or those of all others.
    assert plain_backward.peak == (UNITS + 1) * UNIT + ROW + (UNITS - 1) * COUNT
    # Any unit: likewise, beside that of one unit that is being reduced.
    assert backward.peak == (1 + 2) * UNIT + 2 * ROW + COUNT


@on_one_rank
def test_what_a_step_takes_it_takes_for_one_unit():
    (backward, later), (plain_backward, plain_later) = both(
        torch.optim.AdamW, {"lr": 0.01, "foreach": True}
    )
    assert backward.left == 0 and later.peak == 0
    assert plain_later.peak == UNITS * UNIT
    assert plain_backward.left + plain_later.peak == UNITS * (2 * UNIT + COUNT)
    assert backward.peak == (1 + 2) * UNIT + 2 * ROW + COUNT


@on_one_rank
def test_accumulated_gradients_are_freed():
    cls, options = IN_PLACE["momentum"]
    states = []
    for schedule in ("NNF", "FFF"):
        for make_optimizer in (overlap_optimizer, ordinary):
            model = make()
            optimizer = make_optimizer(model, cls, **options)
            step(model, optimizer, schedule)
            with recorded() as in_window:
                for place, letter in enumerate(schedule):
                    model.set_is_last_backward(place == 2)
                    model.set_gradient_sync(MODES[letter])
                    model(torch.full((1, WIDTH), 0.1)).sum().backward()
            assert in_window.left == 0 or make_optimizer is ordinary
            optimizer.step()
            states.append(full_state(model))
    for other in states[1:]:
        assert_same(states[0], other, bitwise=True)
