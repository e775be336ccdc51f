"""``finalize_backward``: the caller ends a window, instead of its last backward.

Integer gradients, so the bits of any order of sums are those of one process.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CPUOffloadPolicy, GradientReductionHandle, GradientSync
from tests.support import insides
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch, integer_loss
from tests.support.models import seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import Pair
from tests.support.sharding import shard_blocks
from tests.support.strategies import MODES
from tests.support.threads import run_threads


def in_the_mode(apply=shard_blocks, mesh_shape=None, model=None, **kwargs):
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
    model = apply(model or IntegerModel(), mesh, **kwargs)
    model.set_gradient_divide_factor(1.0)
    model.set_manual_backward_finalization(True)
    return model


def backward(model, number=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    integer_loss(model(integer_batch(number, rank))).backward()


def finalize(model, is_async):
    handle = model.finalize_backward(async_op=is_async)
    assert isinstance(handle, GradientReductionHandle) is is_async
    if handle is not None:
        handle.wait()


def pair_of(apply=shard_blocks, mesh_shape=None, **kwargs):
    """Return a model in the mode, and a plain one, which is given what all ranks are given."""
    return Pair(make=lambda model: in_the_mode(apply, mesh_shape, model, **kwargs))


def window(pair, schedule, is_async=False):
    """Run a window, finalize it, and compare gradients."""
    pair.window(schedule)
    pair.ours.set_gradient_sync(GradientSync.FULL)
    finalize(pair.ours, is_async)
    pair.compare()


def train(schedules, *args, **kwargs):
    """Train by windows of these schedules, each twice, and compare all with one process."""
    pair = pair_of(*args, **kwargs)
    for is_async in (False, True):
        for schedule in schedules.split():
            window(pair, schedule, is_async)
            pair.update()


@pytest.mark.parametrize(
    ("schedules", "apply", "mesh_shape"),
    [
        ("F RF FF NF", shard_blocks, (4,)),
        ("N NF RF NRN RR", shard_blocks, (2, 2)),
        ("F NF NN", meshard.replicate, (4,)),
    ],
)
@on_threads(4)
def test_gradients_are_those_of_one_process(schedules, apply, mesh_shape):
    train(schedules, apply, mesh_shape)


@on_ranks(2)
def test_on_processes_too():
    train("NF", shard_blocks)
    train("NF", meshard.replicate)
    train("NF", shard_blocks, offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize("mode", ["N", "R"])
@on_threads(4)
def test_what_is_not_fully_reduced_stays_pending(mode):
    pair = pair_of(mesh_shape=(2, 2))
    optimizer = torch.optim.SGD(pair.ours.parameters(), lr=1.0)
    pair.ours.set_gradient_sync(MODES[mode])
    pair.backward()
    finalize(pair.ours, True)
    assert meshard.pending_gradients(pair.ours)
    with pytest.raises(RuntimeError, match=r"finalize_backward\(\)"):
        optimizer.step()
    pair.ours.set_gradient_sync(GradientSync.FULL)
    finalize(pair.ours, False)
    pair.compare()
    optimizer.step()


@on_threads(4)
def test_finalize_gradients_reduces_everything_in_this_mode_too():
    pair = pair_of(mesh_shape=(2, 2))
    pair.ours.set_gradient_sync(GradientSync.NONE)
    pair.backward()
    meshard.finalize_gradients(pair.ours)
    pair.compare()
    torch.optim.SGD(pair.ours.parameters(), lr=1.0).step()
    pair.ours.finalize_backward()


@on_threads(4)
def test_microbatches_need_one_finalization():
    pair = pair_of(mesh_shape=(2, 2))
    for number in meshard.microbatches(pair.ours, range(3)):
        pair.backward(number)
    pair.ours.finalize_backward()
    pair.compare()


@on_threads(2)
def test_several_backwards_before_and_after_the_mode_is_changed():
    pair = pair_of()
    for is_manual in (True, False, True):
        pair.ours.set_manual_backward_finalization(is_manual)
        pair.zero_grad()
        for number in range(2):
            pair.backward(number)
        if is_manual:
            pair.ours.finalize_backward()
        pair.compare()


@pytest.mark.parametrize("apply", [shard_blocks, meshard.replicate])
@on_threads(2)
def test_optimizers_step_at_finalization(apply):
    models = ours, theirs = in_the_mode(apply), in_the_mode(apply)
    theirs.set_manual_backward_finalization(False)
    optimizers = [
        meshard.overlap_optimizer(each, torch.optim.SGD, lr=LEARNING_RATE) for each in models
    ]
    for is_async in (False, True):
        for schedule in ("F", "NF", "FF"):
            before = full_state(ours)
            for number, letter in enumerate(schedule):
                theirs.set_is_last_backward(number == len(schedule) - 1)
                for model in models:
                    model.set_gradient_sync(MODES[letter])
                    backward(model, number)
            assert_same(full_state(ours), before, bitwise=True)
            finalize(ours, is_async)
            for optimizer in optimizers:
                optimizer.step()
            assert_same(full_state(ours), full_state(theirs), bitwise=True)
            assert all(param.grad is None for param in ours.parameters())


@on_threads(2)
def test_a_unit_that_is_not_fully_reduced_is_stepped_by_a_later_finalization():
    models = [in_the_mode(), in_the_mode()]
    optimizers = [
        meshard.overlap_optimizer(each, torch.optim.SGD, lr=LEARNING_RATE) for each in models
    ]
    models[0].blocks[1].set_gradient_sync(GradientSync.NONE)
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model)
        finalize(model, True)
        model.set_gradient_sync(GradientSync.FULL)
        finalize(model, True)
        optimizer.step()
    assert_same(*map(full_state, models), bitwise=True)


@on_ranks(2)
def test_nothing_may_begin_until_the_handle_is_waited_for():
    pair = pair_of()
    model = pair.ours
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = integer_loss(model(integer_batch(1, dist.get_rank())))
    pair.backward()
    handle = model.finalize_backward(async_op=True)
    for began in (
        lambda: backward(model),
        early.backward,
        model.finalize_backward,
        lambda: model.finalize_backward(async_op=True),
        lambda: model.set_manual_backward_finalization(False),
        optimizer.step,
        lambda: meshard.clip_grad_norm_(model, 1.0),
        model.state_dict,
    ):
        with pytest.raises(RuntimeError, match=r"wait\(\)|set_manual"):
            began()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"a forward began before the wait\(\)"):
        model.blocks[1](torch.ones(1, 5))
    handle.wait()
    handle.wait()
    pair.compare()
    optimizer.step()


@pytest.mark.parametrize("apply", [shard_blocks, meshard.replicate])
def test_a_reset_invalidates_the_handle(apply):
    def run():
        pair = pair_of(apply)
        model = pair.ours
        backward(model)
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"reset_iter_state\(\) was called"):
                handle.wait()
        window(pair, "F", True)  # the mode is still there
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        model.reset_iter_state()
        handle.wait()

    # Each rank gives up reductions that it has started.
    run_threads(run, 2, may_leave_unwaited=True)


@on_threads(2)
def test_units_whose_backward_is_to_come_stay_unsharded():
    pair = pair_of(reshard_after_forward=False)
    pair.backward()
    loss = integer_loss(pair.ours(integer_batch(1, dist.get_rank())))
    finalize(pair.ours, True)
    assert not any(isinstance(param, DTensor) for param in pair.ours.parameters())
    loss.backward()
    finalize(pair.ours, True)
    for rank in range(2):
        backward(pair.plain, 1, rank)
    pair.compare()


@on_threads(2)
def test_zero_grad_drops_what_is_not_finalized():
    pair = pair_of()
    for letter in "FN":
        pair.ours.set_gradient_sync(MODES[letter])
        backward(pair.ours, 5)
        pair.zero_grad()
        window(pair, "NF")
        pair.zero_grad()


@on_threads(2)
def test_a_unit_around_the_root_keeps_the_mode():
    layer = seeded(nn.Linear(4, 4, bias=False))
    outer = nn.Sequential(meshard.fully_shard(layer))
    layer.set_manual_backward_finalization(True)
    meshard.fully_shard(outer)
    with meshard.no_sync(outer):
        outer(torch.ones(1, 4)).sum().backward()
    outer(torch.ones(1, 4)).sum().backward()
    outer.finalize_backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


@on_ranks(1)
def test_before_the_first_backward_there_is_nothing_to_finalize():
    model = in_the_mode()
    model.finalize_backward()
    handle = model.finalize_backward(async_op=True)
    backward(model)  # although the handle is not waited for
    handle.wait()
    model.finalize_backward()
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())
    handle = model.finalize_backward(async_op=True)
    del model  # which the handle does not keep
    handle.wait()


@on_ranks(1)
def test_only_the_root_is_finalized_and_only_in_the_mode():
    model = in_the_mode()
    inner = model.blocks[0]
    backward(model)
    for call in (lambda: inner.set_manual_backward_finalization(True), inner.finalize_backward):
        with pytest.raises(RuntimeError, match=r"on the root, and unit 'blocks.0'"):
            call()
    model.finalize_backward()
    copied = copy.deepcopy(model)
    copied.finalize_backward()
    copied.set_manual_backward_finalization(False)
    backward(copied)
    with pytest.raises(RuntimeError, match=r"needs set_manual_backward_finalization\(True\)"):
        copied.finalize_backward()
    model.finalize_backward()


@on_ranks(1)
def test_nothing_is_finalized_inside_a_step():
    model = in_the_mode()
    hook = model.blocks[0].register_forward_hook(lambda *_: model.finalize_backward())
    with pytest.raises(RuntimeError, match="called inside the forward or backward"):
        backward(model)
    hook.remove()
    output = model(integer_batch(0, 0))
    output.register_hook(lambda _: model.finalize_backward())
    with pytest.raises(RuntimeError, match="called inside the forward or backward"):
        integer_loss(output).backward()
    loss = integer_loss(model(integer_batch(0, 0)))
    loss.register_hook(lambda _: model.finalize_backward())  # it has not reached the model yet
    with pytest.raises(RuntimeError, match="called inside a backward"):
        loss.backward()


@on_ranks(1)
def test_the_mode_stays_as_it_is_until_a_backward_is_finalized():
    model = in_the_mode()

    def check_refused(change):
        with pytest.raises(RuntimeError, match="cannot change the mode"):
            change()

    loss = integer_loss(model(integer_batch(0, 0)))
    loss.register_hook(lambda _: model.set_manual_backward_finalization(False))
    check_refused(loss.backward)
    model.reset_iter_state()
    backward(model)
    check_refused(lambda: model.set_manual_backward_finalization(False))
    model.set_manual_backward_finalization(True)
    model.set_gradient_sync(GradientSync.NONE)
    model.finalize_backward()
    model.set_gradient_sync(GradientSync.FULL)
    handle = model.finalize_backward(async_op=True)
    check_refused(lambda: model.set_manual_backward_finalization(False))
    handle.wait()
    model.set_manual_backward_finalization(False)


@on_ranks(1)
def test_a_forward_that_raises_drops_what_is_not_finalized():
    model = in_the_mode()
    for is_finalized in (False, True):
        backward(model)
        if is_finalized:
            meshard.finalize_gradients(model)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        model.finalize_backward()
        assert all((param.grad is not None) is is_finalized for param in model.parameters())


@on_ranks(1)
def test_units_are_resharded_as_their_settings_say():
    model = in_the_mode()
    for reshards in (False, True):
        model.set_reshard_after_backward(reshards)
        backward(model)
        model.finalize_backward()
        assert insides.unsharded_units(model) == ([] if reshards else insides.labels(model))
