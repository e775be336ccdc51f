"""Flat optimizers: which steps they take, and what they keep from one to the next."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import meshard
from meshard import GradientSync, flat_optimizer
from tests.optim.flat_models import (
    backward,
    backward_loose,
    halve_in_place,
    make,
    make_loose,
    note,
    second,
    train,
    trained,
)
from tests.optim.optimizers import assert_same_state, plain_state
from tests.support.models import seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks, on_threads

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def both(story, make_model, cls, *, bitwise=True, **options):
    """Play ``story`` with a flat optimizer and with the ordinary one, and compare."""
    records = []
    for is_flat in (True, False):
        model = make_model()
        params = list(model.parameters())
        optimizer = (
            flat_optimizer(model, cls, params, **options) if is_flat else cls(params, **options)
        )
        story(model, optimizer)
        records.append((full_state(model), plain_state(optimizer)))
    assert_same(records[0][0], records[1][0], bitwise=bitwise)
    if bitwise:
        assert_same_state(records[0][1], records[1][1])


@on_threads(2)
def test_fused_kernels_agree_to_rounding():
    """The same numbers give others at another place, as the last few do not fill a vector."""

    def story(model, optimizer):
        train(model, optimizer, range(5))

    both(story, lambda: make((2,)), ADAMW, bitwise=False, lr=0.01, fused=True)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_is_converted_between_steps(dtype):
    """Storage that is replaced is stepped where it is now; of bfloat16, gradients lie apart."""

    def story(model, optimizer):
        train(model, optimizer, range(2 * (dtype is torch.float64)))
        model.to(dtype)
        for step in range(5):
            model(torch.full((2, 7), 0.1 * step, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    both(story, lambda: make((2,)), SGD if dtype is torch.float64 else ADAMW, lr=0.01)


@on_threads(2)
def test_guards_hold_and_no_gradient_is_kept():
    model = make((2,))
    optimizer = flat_optimizer(model, ADAMW)
    model.set_gradient_sync(GradientSync.NONE)
    backward(model, 0)
    before = full_state(model)
    with pytest.raises(RuntimeError, match="not reduced yet"):
        optimizer.step()
    assert_same(full_state(model), before, bitwise=True)
    optimizer.zero_grad()
    assert not meshard.pending_gradients(model)
    model.set_gradient_sync(GradientSync.FULL)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    held = [run.flat.grad for run in optimizer._stepper.slices]
    assert held == [None] * len(held)


def test_others_are_refused():
    with pytest.raises(TypeError, match="none of them"):
        flat_optimizer(nn.Linear(2, 2), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="no unit in this Linear"):
        flat_optimizer(nn.Linear(2, 2), SGD)


@on_ranks(2)
def test_groups_that_are_added_later():
    model = make((2,))
    optimizer = flat_optimizer(model, ADAMW, lr=0.01)
    train(model, optimizer, range(2))
    late = nn.Linear(2, 2)
    optimizer.add_param_group({"params": late.parameters(), "lr": 1.0})
    before = late.weight.detach().clone()
    backward(model, 0)
    late(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match=r"are in no unit \(2 in all"):
        optimizer.step()
    assert not torch.equal(late.weight, before)


@on_threads(2)
def test_a_parameter_put_into_a_group():
    """Whoever puts another parameter into a group's list has that one stepped."""
    model, other = make((2,)), make((2,))
    optimizer = flat_optimizer(model, SGD, lr=0.1)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["params"][0] = next(other.parameters())
    before = full_state(model), full_state(other)
    for each in (model, other):
        backward(each, 1)
    optimizer.step()
    assert torch.equal(full_state(model)["tiny"], before[0]["tiny"])
    assert not torch.equal(full_state(other)["tiny"], before[1]["tiny"])


class Small(nn.Module):
    """Fewer rows than ranks, in a unit of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def edit(optimizer, step):
    """Change the state of one parameter, and not of the first, in another way at each step."""
    param = optimizer.param_groups[0]["params"][1]
    if step == 1:
        optimizer.state.pop(param)
    elif step == 2:
        optimizer.state[param]["step"].zero_()
    elif step == 3:
        optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"] * 0.5
    elif step == 4:
        optimizer.state[param] = {}
    elif step == 5:
        optimizer.state.clear()
    elif step == 6:
        for state in optimizer.state_dict()["state"].values():
            state["step"].add_(1)


@on_threads(3)
def test_edits_of_the_state_where_a_rank_owns_nothing():
    def make_model():
        model = seeded(Small())
        for unit in (*model.children(), model):
            meshard.fully_shard(unit)
        return model

    def story(model, optimizer):
        for step in range(8):
            edit(optimizer, step)
            model(torch.full((2, 4), 0.1 * step + 0.1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    both(story, make_model, ADAMW, lr=0.01)


# --- steps that raise, and what is kept between steps ---------------------------------------


@on_threads(2)
def test_a_step_that_raised_can_be_mended():
    def story(model, optimizer):
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

    both(story, make_loose, SGD, lr=0.01, momentum=0.9)


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


@on_threads(2)
def test_a_step_that_raised_counts_as_far_as_the_ordinary_one_had_come():
    options = {"lr": 0.01, "foreach": True}
    ours, theirs = (trained(raise_once, is_flat=flat, options=options) for flat in (True, False))
    assert_same(ours[0], theirs[0], bitwise=True)
    assert_same_state(ours[1], theirs[1])


@on_threads(2)
def test_state_that_comes_later():

    def story(model, optimizer):
        for step in range(5):
            backward_loose(model, step)
            if step == 2:
                assert not plain_state(optimizer)
                optimizer.param_groups[0]["momentum"] = 0.9
            optimizer.step()
            optimizer.zero_grad()
        assert plain_state(optimizer)

    both(story, make_loose, SGD, lr=0.1)


def addresses(optimizer):
    """Return where the slices are, and where their state is."""
    inner = optimizer._stepper._inner
    states = [value for state in inner.state.values() for value in state.values() if value.dim()]
    return [each.data_ptr() for each in (*inner.state, *states)]


@on_threads(2)
def test_slices_and_their_memory_are_kept_from_step_to_step():
    model = make_loose()
    optimizer = flat_optimizer(model, ADAMW, lr=0.01)
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
    optimizer = flat_optimizer(model, ADAMW, lr=0.01)
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


@on_threads(2)
def test_counters_have_memory_of_their_own():
    """A counter is saved with its own four bytes, not with those of the whole model."""
    model = make_loose()
    optimizer = flat_optimizer(model, ADAMW, lr=0.01)
    for step in range(3):
        backward_loose(model, step)
        optimizer.step()
    counters = [state["step"] for state in optimizer.state.values()]
    assert {int(each) for each in counters} == {3}
    assert {each.untyped_storage().nbytes() for each in counters} == {4}
    assert len({each.data_ptr() for each in counters}) == len(counters)
