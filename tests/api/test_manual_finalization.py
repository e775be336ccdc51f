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
from meshard import CommLedger, CPUOffloadPolicy, GradientReductionHandle, GradientSync
from tests.support import insides
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch, integer_loss
from tests.support.models import Tables
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES
from tests.support.threads import run_threads


def sharded(mesh_shape=None, **kwargs):
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
    return by_hand(shard_blocks(IntegerModel(), mesh, **kwargs))


def replicated(mesh_shape=None):
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
    return by_hand(meshard.replicate(IntegerModel(), mesh))


def offloaded(mesh_shape):
    return sharded(mesh_shape, offload_policy=CPUOffloadPolicy(pin_memory=False))


def by_hand(model):
    model.set_gradient_divide_factor(1.0)
    model.set_manual_backward_finalization(True)
    return model


def backward(model, place=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    integer_loss(model(integer_batch(place, rank))).backward()


def finalize(model, is_async):
    handle = model.finalize_backward(async_op=is_async)
    assert isinstance(handle, GradientReductionHandle) is is_async
    if handle is not None:
        handle.wait()


def window(model, step, schedule, is_async=False):
    for place, letter in enumerate(schedule):
        model.set_gradient_sync(MODES[letter])
        backward(model, 10 * step + place)
    model.set_gradient_sync(GradientSync.FULL)
    finalize(model, is_async)


def check_window(model, plain, step, schedule):
    """Compare gradients with those of one process that has run the same window."""
    for place in range(len(schedule)):
        for rank in range(dist.get_world_size()):
            backward(plain, 10 * step + place, rank)
    assert_same(full_grads(model), full_grads(plain), bitwise=True)


def steps(make, mesh_shape, schedule, is_async):
    model, plain = make(mesh_shape), IntegerModel()
    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE) for each in (model, plain)]
    for step in range(3):
        window(model, step, schedule, is_async)
        check_window(model, plain, step, schedule)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain), bitwise=True)


@spread(
    schedule=["F", "N", "NF", "RF", "FF", "NRN", "RR"],
    mesh_shape=[(4,), (2, 2)],
    is_async=[False, True, True],
)
@on_threads(4)
def test_gradients_are_those_of_one_process(mesh_shape, schedule, is_async):
    steps(sharded, mesh_shape, schedule, is_async)


@spread(schedule=["F", "NF", "NN"], is_async=[False, True])
@on_threads(2)
def test_gradients_of_a_replicated_module_are_those_of_one_process(schedule, is_async):
    steps(replicated, (2,), schedule, is_async)


@on_ranks(2)
def test_on_processes_too():
    steps(sharded, (2,), "NF", True)
    steps(replicated, (2,), "NF", True)
    steps(offloaded, (2,), "NF", False)


@on_ranks(2)
def test_a_unit_that_has_not_run_is_left_to_finalization():
    shapes = [[(5,)], [(4,)], [(3,)]]
    model, gradients = Tables(shapes), [[torch.ones(shape)] for (shape,) in shapes]
    for module in (*model.units, model):
        meshard.fully_shard(module)
    model.set_manual_backward_finalization(True)
    with meshard.no_sync(model):
        model(gradients).backward()
    with CommLedger(model) as in_backward:
        model([None, *gradients[1:]]).backward()
    with CommLedger(model) as finally_:
        model.finalize_backward()
    reduced = [
        [each.unit for each in ledger.events if each.op == "reduce_scatter"]
        for ledger in (in_backward, finally_)
    ]
    assert reduced == [["units.1", "(root)"], ["units.0"]]
    assert model.units[0].params[0].grad.full_tensor().tolist() == [1.0] * 5


@pytest.mark.parametrize("mode", ["N", "R"])
@on_threads(4)
def test_what_is_not_fully_reduced_stays_pending(mode):
    model, plain = sharded((2, 2)), IntegerModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_gradient_sync(MODES[mode])
    backward(model)
    finalize(model, True)
    assert meshard.pending_gradients(model)
    with pytest.raises(RuntimeError, match=r"finalize_backward\(\)"):
        optimizer.step()
    model.set_gradient_sync(GradientSync.FULL)
    finalize(model, False)
    check_window(model, plain, 0, "F")
    optimizer.step()


@on_threads(2)
def test_several_backwards_before_and_after_the_mode_is_changed():
    model, plain = sharded((2,)), IntegerModel()
    for is_manual in (True, False, True):
        model.set_manual_backward_finalization(is_manual)
        model.zero_grad(), plain.zero_grad()
        for place in range(2):
            backward(model, place)
        if is_manual:
            model.finalize_backward()
        check_window(model, plain, 0, "FF")


@spread(
    schedule=["F", "NF", "FF", "NF"], is_async=[False, True], make=[sharded, sharded, replicated]
)
@on_threads(2)
def test_optimizers_step_at_finalization(schedule, is_async, make):
    ours, theirs = make((2,)), make((2,))
    theirs.set_manual_backward_finalization(False)
    optimizers = [
        meshard.overlap_optimizer(each, torch.optim.SGD, lr=LEARNING_RATE)
        for each in (ours, theirs)
    ]
    for step in range(3):
        before = full_state(ours)
        for place, letter in enumerate(schedule):
            theirs.set_is_last_backward(place == len(schedule) - 1)
            for model in (ours, theirs):
                model.set_gradient_sync(MODES[letter])
                backward(model, 10 * step + place)
        assert_same(full_state(ours), before, bitwise=True)
        finalize(ours, is_async)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(full_state(ours), full_state(theirs), bitwise=True)
        assert all(param.grad is None for param in ours.parameters())


@on_threads(2)
def test_a_unit_that_is_not_fully_reduced_is_stepped_by_a_later_finalization():
    models = [sharded((2,)), sharded((2,))]
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
    model, plain = sharded((2,)), IntegerModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = integer_loss(model(integer_batch(1, dist.get_rank())))
    backward(model)
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
    check_window(model, plain, 0, "F")
    optimizer.step()


@pytest.mark.parametrize("make", [sharded, replicated])
def test_a_reset_invalidates_the_handle(make):
    def run():
        model, plain = make((2,)), IntegerModel()
        backward(model)
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"reset_iter_state\(\) was called"):
                handle.wait()
        window(model, 0, "F", True)  # the mode is still there
        check_window(model, plain, 0, "F")
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        model.reset_iter_state()
        handle.wait()

    # Each rank gives up reductions that it has started.
    run_threads(run, 2, may_leave_unwaited=True)


@on_threads(4)
def test_microbatches_need_one_finalization():
    model, plain = sharded((2, 2)), IntegerModel()
    for place in meshard.microbatches(model, range(3)):
        backward(model, place)
    model.finalize_backward()
    check_window(model, plain, 0, "FFF")


@on_threads(4)
def test_finalize_gradients_reduces_everything_in_this_mode_too():
    model, plain = sharded((2, 2)), IntegerModel()
    model.set_gradient_sync(GradientSync.NONE)
    backward(model)
    meshard.finalize_gradients(model)
    check_window(model, plain, 0, "F")
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.finalize_backward()


@on_threads(2)
def test_units_whose_backward_is_to_come_stay_unsharded():
    model, plain = sharded((2,), reshard_after_forward=False), IntegerModel()
    backward(model, 0)
    loss = integer_loss(model(integer_batch(1, dist.get_rank())))
    finalize(model, True)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    loss.backward()
    finalize(model, True)
    check_window(model, plain, 0, "FF")


@on_threads(2)
def test_zero_grad_drops_what_is_not_finalized():
    model, plain = sharded((2,)), IntegerModel()
    for schedule in ("F", "N"):
        model.set_gradient_sync(MODES[schedule])
        backward(model, 5)
        model.zero_grad()
        window(model, 0, "NF")
        check_window(model, plain, 0, "NF")
        model.zero_grad(), plain.zero_grad()


@on_threads(2)
def test_a_unit_around_the_root_keeps_the_mode():
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
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
    model = sharded()
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
    model = sharded()
    inner = model.blocks[0]
    with pytest.raises(RuntimeError, match=r"on the root, and unit 'blocks.0'"):
        inner.set_manual_backward_finalization(True)
    backward(model)
    with pytest.raises(RuntimeError, match=r"on the root, and unit 'blocks.0'"):
        inner.finalize_backward()
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
    model = sharded()
    model.blocks[0].register_forward_hook(lambda *_: model.finalize_backward())
    with pytest.raises(RuntimeError, match="called inside the forward or backward"):
        backward(model)
    model.blocks[0]._forward_hooks.popitem()
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
    model = sharded()

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
    model = sharded()
    for is_finalized in (False, True):
        backward(model)
        if is_finalized:
            meshard.finalize_gradients(model)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        model.finalize_backward()
        assert all((param.grad is not None) is is_finalized for param in model.parameters())


@on_ranks(1)
def test_uneven_batches_do_not_work_with_it():
    model = replicated()
    with pytest.raises(RuntimeError, match="uneven_batches does not work with set_manual"):
        next(meshard.uneven_batches(model, [1]))
    model.set_manual_backward_finalization(False)
    for _ in meshard.uneven_batches(model, [1]):
        with pytest.raises(RuntimeError, match="in a loop over uneven_batches"):
            model.set_manual_backward_finalization(True)
        backward(model)


@on_ranks(1)
def test_units_are_resharded_as_their_settings_say():
    model = sharded()

    for reshards in (False, True):
        model.set_reshard_after_backward(reshards)
        backward(model)
        model.finalize_backward()
        assert insides.unsharded_units(model) == ([] if reshards else insides.labels(model))
