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
from tests.support.ranks import on_ranks


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
    """They count as far as the ordinary optimizer had come when it raised."""
    options = {"lr": 0.01, "foreach": True}
    ours, theirs = (trained(raise_once, is_flat=flat, options=options) for flat in (True, False))
    assert_same(ours[0], theirs[0], bitwise=True)
    assert_same_state(ours[1], theirs[1])


def test_steps_that_raise(run_ranks):
    run_ranks(steps_that_raise, 2)
    run_ranks(steps_that_raise_first, 2)


@on_ranks(2)
def test_state_that_comes_later():
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


def addresses(optimizer):
    """Return where the slices are, and where their state is."""
    inner = optimizer._stepper._inner
    states = [value for state in inner.state.values() for value in state.values() if value.dim()]
    return [each.data_ptr() for each in (*inner.state, *states)]


@on_ranks(2)
def test_slices_are_kept_from_step_to_step():
    """Where nothing is replaced, slices and their state stay where they are."""
    model = make_loose()
    optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.01)
    slices, places = [], []
    for step in range(8):
        backward_loose(model, step)
        optimizer.step()
        if step >= 4:  # reading the state makes slices anew, but not their memory
            halve_in_place(model, optimizer)
            note(model, optimizer)
            backward_loose(model, step)
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        slices.append([id(each) for each in optimizer._stepper.slices])
        places.append(addresses(optimizer))
    assert all(each == slices[0] for each in slices[:4])
    assert len(slices[0]) == len(optimizer._stepper.slices) == 2  # one for each unit
    assert all(each == places[0] for each in places)


@on_ranks(2)
def test_hooks_of_all_optimizers_hear_of_a_step_once():
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


@on_ranks(2)
def test_counters_have_memory_of_their_own():
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
