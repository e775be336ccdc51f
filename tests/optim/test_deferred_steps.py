"""Steps that wait for the norm of all gradients, against ordinary clipped steps."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import overlap_optimizer
from meshard.optim.overlap import UnitStepper
from tests.optim.optimizers import (
    ADAMW,
    DEFERRED,
    LAYOUTS,
    MANY,
    MAX_NORM,
    OPTIONS,
    RANKS,
    SignDescent,
    assert_same_training,
    batch,
    grads,
    groups_of,
    make,
    overlapped_and_plain,
    train,
    trainable,
    window,
)
from tests.optim.stand_in_optimizers import StandIn
from tests.support.parity import assert_same, full_state, own_state
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.spread import slow
from tests.support.threads import run_threads


def compare(layout, name, schedule, wait, choose):
    cls, options = MANY.get(name, (SignDescent, {"lr": 0.01}))
    ours, theirs = LAYOUTS[layout](), LAYOUTS[layout]()
    late = overlap_optimizer(ours, cls, choose(ours), wait=wait, **options, **DEFERRED)
    plain = cls(choose(theirs), **options)
    norms = train(ours, late, range(4), schedule=schedule)
    assert norms == train(theirs, plain, range(4), schedule=schedule, clips=True)
    assert max(norms) > MAX_NORM
    assert_same_training((ours, late), (theirs, plain))


@pytest.mark.parametrize(
    ("layout", "name", "schedule", "wait", "choose"),
    [
        slow("one axis", "adamw", "F", "step", trainable),
        ("two axes", "momentum", "NRF", "gather", trainable),
        ("one axis", "another class", "RF", "gather", trainable),
        slow("bfloat16", "adamw", "FFF", "gather", groups_of),
        ("offloaded", "another class", "F", "step", trainable),
        # Plain tensors are read without a gather that could wait, so ``step`` steps them.
        ("replicated", "sgd", "F", "gather", trainable),
    ],
)
def test_as_the_ordinary_one(layout, name, schedule, wait, choose):
    run_threads(compare, RANKS.get(layout, 2), layout, name, schedule, wait, choose)


@on_ranks(2)
def test_offloaded_units_are_clipped_in_processes():
    compare("offloaded", "adamw", "F", "step", trainable)


@contextlib.contextmanager
def noted():
    """Yield the labels of the units whose deferred step is taken inside."""
    stepped, run = [], UnitStepper.run

    def note(self, *args):
        stepped.append(self.group.label)
        return run(self, *args)

    with mock.patch.object(UnitStepper, "run", note):
        yield stepped


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_steps_are_taken_in_step_or_before_the_next_gather(wait):
    model = make()
    optimizer = overlap_optimizer(model, torch.optim.SGD, lr=0.1, wait=wait, **DEFERRED)
    with noted() as stepped:
        window(model, 0)
        assert stepped == []
        optimizer.step()
        if wait == "step":
            assert len(stepped) == 5
            return
        optimizer.zero_grad()
        model.zero_grad()
        assert stepped == []
        entered = []
        for each in (model, *model.blocks):
            each.register_forward_pre_hook(lambda *_: entered.append(len(stepped)))
        with torch.no_grad():
            model(batch(0))
        assert len(stepped) == 5  # each once
        assert entered != [5] * 5, "all were stepped before the first was gathered"
        for number, ask in enumerate((optimizer.wait, optimizer.state_dict, model.state_dict), 1):
            window(model, number)
            optimizer.step()
            assert len(stepped) == 5 * number
            ask()
            assert len(stepped) == 5 * (number + 1)
        window(model, 5)
        optimizer.step()
        before = {name: value.clone() for name, value in full_state(model).items()}
        model.load_state_dict(before, strict=False)  # after the step, not before
        optimizer.wait()
        assert_same(full_state(model), before, bitwise=True)


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_an_interrupted_window_is_void(wait):
    (ours, late), (theirs, plain) = overlapped_and_plain(wait=wait, **DEFERRED)

    def fail(*_):
        raise ZeroDivisionError

    train(ours, late, range(2))
    hook = ours.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        window(ours, 5)
    hook.remove()
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        late.step()
    if dist.get_rank() == 0:  # alone: nothing may communicate
        assert {float(each["step"]) for each in late.state.values()} == {2.0}
    train(ours, late, range(2, 4))
    train(theirs, plain, range(4), clips=True)
    assert_same_training((ours, late), (theirs, plain))


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_several_roots_are_clipped_by_one_norm(wait):
    """One norm for all, whichever of them is run again before the backward of the other."""
    (ours, late), (theirs, plain) = overlapped_and_plain(
        make=lambda: nn.ModuleList([make(), make()]), wait=wait, **DEFERRED
    )
    for number in range(3):
        for both, optimizer in ((ours, late), (theirs, plain)):
            window(both[0], number)
            with torch.no_grad():
                both[0](batch(number))
            window(both[1], number + 1)
            norm = meshard.clip_grad_norm_(both, MAX_NORM) if both is theirs else None
            optimizer.step()
            optimizer.zero_grad()
        assert late.total_norm == norm
    assert_same_training((ours, late), (theirs, plain))


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_a_window_that_is_cleared_is_not_stepped(wait):
    """Gradients are in ``.grad`` until ``step``: what drops them there drops the window."""
    (ours, late), (theirs, plain) = overlapped_and_plain(wait=wait, **DEFERRED)
    train(ours, late, range(2))
    for drop in (late.zero_grad, ours.zero_grad):
        late.wait()
        before = full_state(ours)
        window(ours, 7)
        for grad in grads(ours):
            grad.mul_(float("nan"))
        drop()
        late.step()
        assert_same(full_state(ours), before, bitwise=True)
    late.param_groups[0]["lr"] = 0.5
    window(ours, 2)
    late.param_groups[0]["lr"] = 0.002  # between backward and step
    late.step()
    late.param_groups[0]["lr"] = OPTIONS["lr"]
    late.zero_grad()
    train(theirs, plain, range(2), clips=True)
    plain.param_groups[0]["lr"] = 0.002
    train(theirs, plain, range(2, 3), clips=True)
    assert_same_training((ours, late), (theirs, plain))


@on_ranks(2)
def test_a_scaler_works_as_with_any_optimizer():
    pairs = overlapped_and_plain(**DEFERRED)
    for model, optimizer in pairs:
        scaler = meshard.ShardedGradScaler("cpu", init_scale=8.0)
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            scaler.scale(model(batch(number)).sum() * factor).backward()
            scaler.unscale_(optimizer)
            if isinstance(optimizer, ADAMW):
                meshard.clip_grad_norm_(model, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
    assert_same_training(*pairs)


@on_ranks(2)
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_edited_gradients_are_clipped(how):
    pairs = (_, late), (_, plain) = overlapped_and_plain(**DEFERRED)
    for number in range(3):
        for model, optimizer in pairs:
            window(model, number)
            for param in model.parameters():
                if param.grad is not None and how == "in place":
                    param.grad.mul_(2.0)
                elif param.grad is not None:
                    param.grad = param.grad * 2.0
            norm = meshard.clip_grad_norm_(model, MAX_NORM) if optimizer is plain else None
            optimizer.step()
            optimizer.zero_grad()
        assert late.total_norm == norm > MAX_NORM
    assert_same_training(*pairs)


@contextlib.contextmanager
def other_modes():
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        yield


class Multiplying(StandIn):
    """Steps by a matrix product, which autocast would round."""

    def step_one(self, group, param, grad, state):
        grad = grad.to_local()
        factors = torch.full((grad.numel(), 2), float(group["lr"]))
        product = grad.reshape(1, -1).mm(factors) if grad.numel() else torch.zeros(1, 2)
        param.to_local().sub_(product[0, 0])


@on_ranks(2)
@pytest.mark.parametrize("cls", [torch.optim.Adam, Multiplying])
def test_a_step_in_a_forward_under_other_modes(cls):
    ours, theirs = make(), make()
    for model, wait in ((ours, "gather"), (theirs, "step")):
        rate = torch.tensor(0.1)
        optimizer = overlap_optimizer(model, cls, lr=rate, wait=wait, **DEFERRED)
        for number in range(3):
            window(model, number)
            optimizer.step()
            optimizer.zero_grad()
            rate.mul_(0.5)  # as a scheduler does
            with other_modes():
                model(batch(number))
        optimizer.wait()
    assert_same(own_state(ours), own_state(theirs), bitwise=True)


@on_ranks(2)
def test_errors():
    model = make()
    for wrong in ({"clip": "deferred"}, {"max_norm": 1.0}):
        with pytest.raises(ValueError, match="max_norm go together"):
            overlap_optimizer(model, ADAMW, **wrong)
    with pytest.raises(ValueError, match="clip_value go without"):
        overlap_optimizer(model, ADAMW, clip_value=1.0, **DEFERRED)
    with pytest.raises(ValueError, match='must be "deferred" or None'):
        overlap_optimizer(model, ADAMW, clip="norm", max_norm=1.0)
    late = overlap_optimizer(model, ADAMW, trainable(model)[:2], **DEFERRED)
    for is_detached in (False, True):
        if is_detached:
            late.detach()
        with pytest.raises(ValueError, match="in no unit"):
            late.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        assert len(late.param_groups) == 1


@on_fake_ranks(2)
def test_a_step_that_raises_is_not_taken_again():
    steps = []

    class FailsOnce(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            steps.append(self)
            if len(steps) == 1:
                raise ZeroDivisionError

    model = nn.Linear(4, 4)
    meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
    late = overlap_optimizer(model, FailsOnce, wait="gather", clip="deferred", max_norm=1.0, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    late.step()
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4))
        stepped = model.weight.to_local().clone()
        model(torch.ones(2, 4))
    assert len(steps) == 1
    assert torch.equal(model.weight.to_local(), stepped)


@on_ranks(2)
def test_two_optimizers_of_a_parameter_are_refused_after_buckets_were_rebuilt_too():
    model = LAYOUTS["replicated"]()
    first = overlap_optimizer(model, ADAMW, **DEFERRED)
    for number in range(3):  # the forward of the second window rebuilds the buckets
        window(model, number)
        with pytest.raises(ValueError, match="by another optimizer of overlap_optimizer"):
            overlap_optimizer(model, ADAMW)
        first.step()
