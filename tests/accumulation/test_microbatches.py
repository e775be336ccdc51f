"""The ``microbatches`` loop, which needs nothing but batches."""

import contextlib
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

import meshard
from meshard import GradientSync
from tests.support import insides
from tests.support.models import MlpStack, seeded
from tests.support.ones import make, run, values
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter([1.0, 2.0, 3.0])


@on_threads(4)
def test_microbatches_need_no_length():
    model = make()
    model.set_is_last_backward(False)
    lifecycle = insides.units(model)[0].lifecycle
    for batch in meshard.microbatches(model, DataLoader(Stream(), batch_size=None)):
        model(batch, None).backward()
    assert lifecycle.is_last_backward is False  # as it was before
    assert list(meshard.microbatches(model, [])) == []

    lifecycle.is_last_backward = True
    assert values(model)["a"] == 6.0


HELD = {
    GradientSync.NONE: "holds gradients that are not reduced yet",
    GradientSync.REDUCE_SCATTER: "holds gradients that are not reduced across the replicas yet",
    GradientSync.FULL: "holds gradients that are those of some microbatches only",
}


@on_threads(4)
@spread(until_last=list(GradientSync), asks=[False, True])
def test_a_step_in_an_open_window_is_refused_and_told_to_come_after_the_loop(until_last, asks):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = meshard.microbatches(model, [1.0, 2.0], until_last=until_last)
    model(next(loop), None).backward()
    if asks:
        meshard.pending_gradients(model)  # after which those that are reduced are in .grad
    with pytest.raises(
        RuntimeError, match=r"after the loop over microbatches\(\), not inside"
    ) as error:
        optimizer.step()
    assert HELD[until_last] in str(error.value)
    for batch in loop:
        model(batch, None).backward()
    optimizer.step()
    # Elsewhere nothing is said of a loop.
    optimizer.zero_grad()
    run(model, "FR", 1.0, None)
    text = rf"unit '\(root\)' {HELD[GradientSync.REDUCE_SCATTER]}.*finalize_gradients"
    with pytest.raises(RuntimeError, match=text) as error:
        optimizer.step()
    assert "loop" not in str(error.value)
    meshard.finalize_gradients(model)
    optimizer.step()
    assert values(model)["a"] == 2.0


@on_threads(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("loops", [True, False])
def test_fully_reduced_gradients_are_in_grad_after_every_microbatch(mesh_shape, loops):
    """Users read them there, and edit them: the last unit's reduction must not come later."""
    model = shard_blocks(seeded(MlpStack()), init_device_mesh("cpu", mesh_shape))
    plain = seeded(MlpStack())
    numbers = range(3)
    if loops:
        numbers = meshard.microbatches(model, numbers, until_last=GradientSync.FULL)
    else:
        model.set_is_last_backward(False)
    for number in numbers:
        for module in (model, plain):
            module(torch.full((2, 6), 0.25 * number + 0.25)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for module in (model, plain):
            for param in module.parameters():
                param.grad.mul_(0.5)


def fail(error, *_):
    raise error


def run_microbatch(model, number, fails_in):
    x = torch.full((2, 6), 0.25 * number + 0.25)
    with contextlib.ExitStack() as stack:
        if isinstance(fails_in, type):
            handle = model.blocks[1].register_forward_pre_hook(partial(fail, fails_in))
            stack.callback(handle.remove)
        out = model(x)
        if fails_in == "backward":
            out.register_hook(partial(fail, ZeroDivisionError))
        out.square().mean().backward()


@on_threads(2)
@pytest.mark.parametrize("fails_in", [ZeroDivisionError, KeyboardInterrupt, "backward"])
@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("until_last", [GradientSync.NONE, GradientSync.FULL])
def test_the_step_of_a_loop_that_has_caught_an_exception_is_refused(fails_in, failing, until_last):
    """Also if it was the last microbatch that failed."""
    model, plain = shard_blocks(seeded(MlpStack())), seeded(MlpStack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.to_local().clone() for param in model.parameters()]

    def window(*, fails):
        for number in meshard.microbatches(model, range(3), until_last=until_last):
            with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
                run_microbatch(model, number, fails_in if fails and number == failing else None)

    window(fails=True)
    with pytest.raises(RuntimeError, match="a microbatch of its loop, so some gradients are miss"):
        optimizer.step()
    after = [param.to_local() for param in model.parameters()]
    assert all(map(torch.equal, before, after))
    window(fails=False)
    for number in range(3):
        run_microbatch(plain, number, None)
    assert_same(full_grads(model), full_grads(plain))
    optimizer.step()


@on_threads(2)
def test_a_microbatch_that_is_run_again_in_the_loop_does_not_make_up_for_the_others():
    model = shard_blocks(seeded(MlpStack()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in meshard.microbatches(model, range(2)):
        if number == 1:
            with pytest.raises(ZeroDivisionError):
                run_microbatch(model, number, ZeroDivisionError)
        run_microbatch(model, number, None)
    with pytest.raises(RuntimeError, match="some gradients are missing"):
        optimizer.step()


@on_threads(2)
def test_a_loop_goes_on_after_an_exception_that_has_dropped_nothing():
    """As one process does: in the first forward, and in an evaluation."""
    model, plain = shard_blocks(seeded(MlpStack())), seeded(MlpStack())
    for number in meshard.microbatches(model, range(3)):
        if number == 0:
            with pytest.raises(ZeroDivisionError):
                run_microbatch(model, number, ZeroDivisionError)
            continue
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            run_microbatch(model, number, ZeroDivisionError)
        for module in (model, plain):
            run_microbatch(module, number, None)
    assert_same(full_grads(model), full_grads(plain))


def wrapped(wrap):
    model = seeded(MlpStack())
    return meshard.replicate(model) if wrap == "replicate" else shard_blocks(model)


@on_threads(2)
@spread(until_last=list(GradientSync), wrap=["shard", "replicate"], how=["raise", "break"])
def test_a_loop_that_is_left_early_drops_its_window(until_last, wrap, how):
    """Also by an exception that no unit sees, as one in the loss."""
    model, plain = wrapped(wrap), seeded(MlpStack())

    def window(leaves_at):
        for number in meshard.microbatches(model, range(3), until_last=until_last):
            if number == leaves_at and how == "break":
                break
            loss = model(torch.full((2, 6), 0.25 * number + 0.25)).square().mean()
            if number == leaves_at:
                raise ZeroDivisionError
            loss.backward()

    with pytest.raises(ZeroDivisionError) if how == "raise" else contextlib.nullcontext():
        window(leaves_at=1)
    assert not meshard.pending_gradients(model)
    window(leaves_at=None)
    for number in range(3):
        run_microbatch(plain, number, None)
    assert_same(full_grads(model), full_grads(plain))


@on_threads(2)
def test_a_loop_whose_end_is_not_asked_for_keeps_what_its_last_batch_has_reduced():
    model, plain = wrapped("shard"), seeded(MlpStack())
    for _, number in zip(range(3), meshard.microbatches(model, range(3)), strict=False):
        for module in (model, plain):
            run_microbatch(module, number, None)
    assert_same(full_grads(model), full_grads(plain))


class CountedEpochs:
    """Batches that are the number of the epoch; each ``iter`` begins another one, as in loaders."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([torch.full((1, 2), float(self.epoch))])


def weighted(model, batches):
    return (batch for batch, _ in meshard.uneven_batches(model, batches))


@pytest.mark.parametrize("loop", [meshard.microbatches, weighted])
@on_threads(1)
def test_batches_are_iterated_once(loop):
    model = meshard.replicate(torch.nn.Linear(2, 1))
    seen = []
    for batch in loop(model, CountedEpochs()):
        seen.append(batch[0, 0].item())
        model(batch).sum().backward()
    assert seen == [1.0]
