"""Local optimizers and those in backward against the ordinary ones after it, bit for bit."""

import functools

import pytest
import torch

import meshard
from meshard import GradientSync, local_optimizer, overlap_optimizer
from tests.optim.optimizers import (
    ADAMW,
    LAYOUTS,
    MANY,
    OPTIONS,
    RANKS,
    SignDescent,
    assert_same_state,
    batch,
    grads,
    groups_of,
    make,
    plain_state,
    train,
    trainable,
    window,
)
from tests.support.parity import assert_same, own_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import mostly_slow, spread
from tests.support.strategies import MODES
from tests.support.threads import run_threads

KINDS = {
    "local": local_optimizer,
    "in backward": overlap_optimizer,
    "in backward, awaited by gathers": functools.partial(overlap_optimizer, wait="gather"),
}


def compare(story, make_model=make, name="adamw", *, groups=trainable, kinds=KINDS):
    """Play ``story`` with the ordinary optimizer, and with all others that take its class."""
    cls, options = MANY.get(name, (SignDescent, {"lr": 0.01}))
    if cls in (torch.optim.SGD, torch.optim.ASGD, torch.optim.RAdam):
        options = {**options, "lr": 1e-3}  # with that of the table, training diverges

    def played(make_optimizer):
        model = make_model()
        optimizer = make_optimizer(model, cls, groups(model), **options)
        story(model, optimizer)
        state = plain_state(optimizer)  # waits for steps
        return own_state(model), state

    params, state = played(lambda _, cls, groups, **options: cls(groups, **options))
    assert all(param.isfinite().all() for param in params.values())
    for kind in kinds:
        if cls is SignDescent and kind == "local":
            continue
        found = played(KINDS[kind])
        assert_same(found[0], params, bitwise=True, what=kind)
        assert_same_state(found[1], state)


@pytest.mark.slow
@on_threads(2)
@pytest.mark.parametrize("name", [*MANY, "another class"])
def test_every_class(name):
    compare(functools.partial(train, windows=range(4)), name=name, kinds=("local", "in backward"))


@pytest.mark.slow
@spread(
    layout=[*LAYOUTS],
    schedule=["F", "RF", "NRF", "FFF", "RRF"],
    name=["adamw", "momentum", "another class"],
)
def test_every_layout(layout, schedule, name):
    story = functools.partial(train, windows=range(3), schedule=schedule)
    run_threads(compare, RANKS.get(layout, 2), story, LAYOUTS[layout], name)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "schedule", "name"),
    [
        ("one axis", "RF", "adamw"),
        ("offloaded", "RF", "another class"),  # whose step waits for copies to the host itself
        ("replicated", "RF", "adamw"),
        ("rests in the last microbatch", "NNF", "adamw"),
    ],
)
def test_in_processes(layout, schedule, name):
    compare(functools.partial(train, windows=range(3), schedule=schedule), LAYOUTS[layout], name)


# --- what users do on the way --------------------------------------------------------------


def rates_and_rest(model, optimizer):
    for number, schedule in enumerate(("F", "F", "NRF", "F", "RF")):
        train(model, optimizer, [number], schedule=schedule, rest=number == 3)
        optimizer.param_groups[0]["lr"] *= 0.5


def one_cycle(model, optimizer):
    """The rates and momenta of all param groups change after each step."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=6)
    for number in range(5):
        train(model, optimizer, [number])
        scheduler.step()


def edits(model, optimizer):
    train(model, optimizer, range(2))
    first = optimizer.state[model.blocks[0].up.bias]
    first["exp_avg"].mul_(0.5)
    first["exp_avg_sq"] = first["exp_avg_sq"] * 2
    train(model, optimizer, range(2, 3))
    optimizer.state.pop(model.blocks[1].up.weight)
    train(model, optimizer, range(3, 4))
    if isinstance(optimizer, meshard.OverlappedOptimizer):
        optimizer.wait()
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    train(model, optimizer, range(4, 5))


def moves(model, optimizer):
    """Shards that are replaced between two windows are those that are stepped."""
    train(model, optimizer, range(2))
    with meshard.offload(model, optimizer):
        pass
    train(model, optimizer, range(2, 4))
    model.load_state_dict(model.state_dict())
    train(model, optimizer, range(4, 5))
    model.double()
    model.float()
    train(model, optimizer, range(5, 7))


def frozen(model, optimizer):
    """Some parameters are stepped less often than others of their unit, from some step on."""
    several = trainable(model)[::2]
    for number in range(7):
        for param in several:
            param.requires_grad_(number not in (3, 4))
        train(model, optimizer, [number])


def hooks(model, optimizer):
    """What hooks of parameters do to gradients counts."""
    train(model, optimizer, range(2))
    up, seen = model.blocks[0].up, []

    def halve(param):
        seen.append(param.grad.full_tensor())
        param.grad.mul_(0.5)

    handle = up.weight.register_post_accumulate_grad_hook(halve)
    train(model, optimizer, range(2, 4))
    handle.remove()
    model.blocks[3].up.bias.register_hook(lambda grad: grad * 2)
    train(model, optimizer, range(4, 6))
    assert len(seen) == 2
    optimizer.state[up.weight]["seen"] = torch.stack(seen)  # compared with the states


def finalized(model, optimizer):
    for number, (schedule, is_last) in enumerate([("NN", True), ("RR", False), ("FF", False)]):
        model.set_is_last_backward(is_last)
        for place, letter in enumerate(schedule):
            model.set_gradient_sync(MODES[letter])
            model(batch(10 * number + place)).square().sum().backward()
        meshard.finalize_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def microbatches(model, optimizer):
    for mode in GradientSync:
        parts = [batch(1), batch(2), batch(3)]
        for part in meshard.microbatches(model, parts, until_last=mode):
            model(part).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def closure(model, optimizer):
    def compute():
        optimizer.zero_grad()
        loss = model(batch(1)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(compute).item() for _ in range(2)]
    optimizer.state[model.first.weight]["losses"] = losses


STORIES = [rates_and_rest, edits, frozen, hooks, finalized, microbatches, closure]


@on_threads(2)
@pytest.mark.parametrize(
    "story", mostly_slow(STORIES, edits, microbatches), ids=lambda story: story.__name__
)
def test_what_users_do_on_the_way(story):
    compare(story)


@on_ranks(2)  # all optimizers of a process let go of shards that move
def test_shards_that_move():
    compare(moves)


@on_threads(2)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_schedulers_and_param_groups(name):
    compare(one_cycle, name=name, groups=groups_of)


@on_threads(2)
def test_gradients_are_freed_in_backward():
    for kind, make_optimizer in KINDS.items():
        model = make()
        optimizer = make_optimizer(model, ADAMW, **OPTIONS)
        for number in range(2):
            window(model, number)
            assert (grads(model) == []) == kind.startswith("in backward"), kind
            optimizer.step()
            optimizer.zero_grad()
