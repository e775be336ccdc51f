"""An optimizer in backward while hyperparameters, hooks, flags and shards change."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import overlap_optimizer
from tests.support.live_memory import settled_tensor_bytes
from tests.support.optimizers import (
    ADAMW,
    DTYPES,
    MANY,
    OPTIONS,
    assert_same_state,
    groups_of,
    make,
    plain_state,
    train,
    trainable,
    window,
)
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_fake_ranks, on_ranks


@on_ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad"])
def test_as_the_ordinary_one(name, dtype):
    cls, options = MANY[name]
    ours, theirs = make((2,), DTYPES[dtype]), make((2,), DTYPES[dtype])
    overlapped = overlap_optimizer(ours, cls, groups_of(ours), **options)
    plain = cls(groups_of(theirs), **options)
    for number, schedule in enumerate(("F", "F", "NRF", "F", "RF")):
        for model, optimizer in ((theirs, plain), (ours, overlapped)):
            window(model, number, schedule, rest=number == 3)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same_state(plain_state(overlapped), plain_state(plain))


@on_ranks(2)
def test_hooks_of_parameters():
    """Who hooks a parameter sees its gradient, and what the hook does to it counts."""
    ours, theirs = make((2,)), make((2,))
    seen = {ours: [], theirs: []}
    overlapped, plain = overlap_optimizer(ours, ADAMW, **OPTIONS), ADAMW(trainable(theirs))
    plain.param_groups[0].update(OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(2))

        def halve(param, model=model):
            seen[model].append(param.grad.full_tensor())
            param.grad.mul_(0.5)

        handle = model.blocks[0].up.weight.register_post_accumulate_grad_hook(halve)
        train(model, optimizer, range(2, 4))
        handle.remove()
        model.blocks[3].up.bias.register_hook(lambda grad: grad * 2)
        train(model, optimizer, range(4, 6))
    assert len(seen[ours]) == 2
    for one, other in zip(seen[ours], seen[theirs], strict=True):
        assert torch.equal(one, other)
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_asked_for_in_the_middle_of_a_backward():
    """Whoever asks in the middle of a backward gets what has been stepped by then."""
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(2))
    counts = []

    def ask(*_):
        counts.append({int(state["step"]) for state in optimizer.state.values() if state})

    handle = model.blocks[0].register_full_backward_hook(ask)
    window(model, 2)
    handle.remove()
    assert counts == [{2, 3}]
    window(model, 3)
    assert {int(state["step"]) for state in optimizer.state.values() if state} == {4}


@on_ranks(2)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_parameters_frozen_after_some_steps(name):
    """A parameter that is stepped less often than others of its unit, from some step on."""
    cls, options = MANY[name]
    theirs, ours = make((2,)), make((2,))
    plain = cls(trainable(theirs), **options)
    overlapped = overlap_optimizer(ours, cls, trainable(ours), **options)
    several = [param for model in (theirs, ours) for param in trainable(model)[::2]]
    for number in range(7):
        for param in several:
            param.requires_grad_(number not in (3, 4))
        for model, optimizer in ((theirs, plain), (ours, overlapped)):
            window(model, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same_state(plain_state(overlapped), plain_state(plain))


@on_ranks(2)
def test_parameters_frozen_between():
    """Runs that are cut leave nothing behind."""
    model = make((2,))
    for param in model.parameters():
        param.requires_grad_(True)
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(3))
    assert len(optimizer.state) > 0  # reading it makes views for each parameter, here and below
    before = settled_tensor_bytes()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    train(model, optimizer, range(3, 6))
    state = sum(
        value.to_local().nbytes
        for each in optimizer.state.values()
        for value in each.values()
        if value.dim()
    )
    assert settled_tensor_bytes() - before < state // 4


@on_ranks(2)
def test_a_step_that_raises():
    """What has been stepped before a step that raises still counts."""
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(3))
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "0.1"
    with pytest.raises(TypeError):
        window(model, 3)
    model.reset_iter_state()
    optimizer.param_groups[0]["lr"] = lr
    train(model, optimizer, range(4, 6))
    # AdamW counts a step before it reads lr; units that it has not come to were not stepped.
    assert {float(each["step"]) for each in optimizer.state.values()} <= {5.0, 6.0}


def replaced():
    """Shards that are replaced between two windows are those that are stepped."""
    ours, theirs = make((2,)), make((2,))
    overlapped, plain = overlap_optimizer(ours, ADAMW, **OPTIONS), ADAMW(trainable(theirs))
    plain.param_groups[0].update(OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(2))
        train(model, optimizer, range(2, 4))
        with meshard.offload(model, optimizer):
            pass
        train(model, optimizer, range(4, 6))
        model.double()
        model.float()
        train(model, optimizer, range(6, 8))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


def test_shards_that_move(run_ranks):
    run_ranks(replaced, 2)


@on_fake_ranks(2)
@pytest.mark.parametrize("make", [overlap_optimizer, meshard.flat_optimizer])
def test_a_parameter_that_moves_to_the_next_group_has_the_hyperparameters_of_that(make):
    layer = torch.nn.Linear(4, 4)
    meshard.fully_shard(layer, init_device_mesh("cpu", (2,)))
    groups = [{"params": [layer.weight, layer.bias], "lr": 0.0}, {"params": [], "lr": 1.0}]
    optimizer = make(layer, torch.optim.SGD, groups)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = layer.bias.to_local().clone()
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())  # in the order of before
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.bias.to_local(), before)
