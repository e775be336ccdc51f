"""Flat optimizers: which steps they take, and what they keep from one to the next."""

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshard import flat_optimizer
from tests.support.flat_models import (
    backward_loose,
    halve_in_place,
    make_loose,
    note,
    second,
    trained,
)
from tests.support.optimizers import assert_same_state, plain_state
from tests.support.parity import assert_same, full_state


def steps_that_raise():
    """What raises with the ordinary optimizer raises here, and can be mended."""
    records = []
    for is_flat in (True, False):
        model = make_loose()
        params = list(model.parameters())
        cls, options = torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}
        optimizer = (
            flat_optimizer(model, cls, params, **options) if is_flat else cls(params, **options)
        )
        for step in range(4):
            backward_loose(model, step)
            if step == 2:
                group = optimizer.param_groups[0]
                lr, group["lr"] = group["lr"], "fast"
                with pytest.raises(TypeError):
                    optimizer.step()
                group["lr"] = lr
                # The ordinary one was through with the momentum of one parameter, the other with
                # that of a run: both begin anew.
                optimizer.state.clear()
            optimizer.step()
            optimizer.zero_grad()
        records.append(full_state(model))
    assert_same(records[0], records[1], bitwise=True)


def raise_once(model, optimizer):
    """Have a step raise for its hyperparameters, and one for a state that is missing."""
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = lr
    gone = second(model, optimizer).pop("exp_avg")
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.step()
    second(model, optimizer)["exp_avg"] = gone


def steps_that_raise_first():
    """Nothing was changed before they raised, so they do not count."""
    options = {"lr": 0.01, "foreach": True}
    straight = trained(lambda model, optimizer: None, is_flat=True, options=options)
    mended = trained(raise_once, is_flat=True, options=options)
    assert_same(straight[0], mended[0], bitwise=True)
    assert_same_state(straight[1], mended[1])


def test_steps_that_raise(run_ranks):
    run_ranks(steps_that_raise, 2)
    run_ranks(steps_that_raise_first, 2)


def later_momentum():
    """State that the optimizer makes only after some steps."""
    records = []
    for is_flat in (True, False):
        model = make_loose()
        cls, params = torch.optim.SGD, list(model.parameters())
        optimizer = flat_optimizer(model, cls, params, lr=0.1) if is_flat else cls(params, lr=0.1)
        for step in range(5):
            backward_loose(model, step)
            if step == 2:
                optimizer.param_groups[0]["momentum"] = 0.9
            optimizer.step()
            optimizer.zero_grad()
        records.append((full_state(model), plain_state(optimizer)))
    assert records[0][1], "there is no state"
    assert_same(records[0][0], records[1][0], bitwise=True)
    assert_same_state(records[0][1], records[1][1])


def test_state_that_comes_later(run_ranks):
    run_ranks(later_momentum, 2)


def nothing_new():
    """Where nothing is edited, runs stay what they are: all the rest is slow."""
    model = make_loose()
    optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.01)
    seen = []
    for step in range(6):
        backward_loose(model, step)
        optimizer.step()
        halve_in_place(model, optimizer)
        note(model, optimizer)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        seen.append([id(run) for run in optimizer._stepper.slices])
    assert seen[0] == seen[-1] and all(each == seen[0] for each in seen)
    assert len(seen[0]) == 2  # one for each unit


def test_runs_are_kept_from_step_to_step(run_ranks):
    run_ranks(nothing_new, 2)


def hooked():
    model = make_loose()
    optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.01)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda own, args, kwargs: calls.append(own)),
        register_optimizer_step_post_hook(lambda own, args, kwargs: calls.append(own)),
    ]
    for step in range(2):
        backward_loose(model, step)
        optimizer.step()
    for handle in handles:
        handle.remove()
    assert calls == [optimizer] * 4


def test_hooks_of_all_optimizers_hear_of_a_step_once(run_ranks):
    run_ranks(hooked, 2)


def of_their_own():
    """A counter is saved with its own four bytes, not with those of the whole model."""
    model = make_loose()
    optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(3):
        backward_loose(model, step)
        optimizer.step()
    counters = [state["step"] for state in optimizer.state.values()]
    assert {int(each) for each in counters} == {3}
    assert {each.untyped_storage().nbytes() for each in counters} == {4}
    assert len({each.data_ptr() for each in counters}) == len(counters)


def test_counters_have_memory_of_their_own(run_ranks):
    run_ranks(of_their_own, 2)
