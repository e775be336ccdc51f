"""Uneven batches with accumulation, with options, and where ranks do not fit together."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.models import seeded
from tests.support.ranks import on_ranks
from tests.support.spread import spread

COUNTS = [3, 0, 5, 1]  # batches of each rank
LONGEST = max(COUNTS)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch_of(rank, number):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def own_batches():
    rank = dist.get_rank()
    return [batch_of(rank, number) for number in range(COUNTS[rank])]


def replicated():
    model = meshard.replicate(seeded(net(), 0), bucket_cap_mb=4e-5)
    assert len(model._meshard_buckets.units) > 1
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def loss_of(model, batch):
    return model(batch).square().sum()


def ends_window(number):
    """Windows of two iterations. The last one, of one, is ended by hand."""
    return number % 2 == 1


def around_both(model, number, batch):
    with contextlib.nullcontext() if ends_window(number) else model.no_sync():
        loss_of(model, batch).backward()


def around_the_backward(model, number, batch):
    loss = loss_of(model, batch)
    with contextlib.nullcontext() if ends_window(number) else model.no_sync():
        loss.backward()


def by_a_setter(model, number, batch):
    model.set_gradient_sync(GradientSync.FULL if ends_window(number) else GradientSync.NONE)
    loss_of(model, batch).backward()
    model.set_gradient_sync(GradientSync.FULL)


def in_parts(model, number, batch):
    """Microbatches of one batch, of which the last reduces or not."""
    until_last = GradientSync.REDUCE_SCATTER
    if ends_window(number):
        for part in meshard.microbatches(model, batch.chunk(3), until_last=until_last):
            loss_of(model, part).backward()
        return
    with meshard.gradient_sync(model, until_last):
        for part in batch.chunk(3):
            loss_of(model, part).backward()


def train(run, options):
    model, optimizer = replicated()
    number = -1
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches(), **options)):
        if batch is not None:
            run(model, number, batch)
        if ends_window(number):
            optimizer.step()
            optimizer.zero_grad()
        else:
            with pytest.raises(RuntimeError, match="not reduced yet"):
                optimizer.step()  # also on a rank without a batch
    assert number == max(COUNTS[: dist.get_world_size()]) - 1
    meshard.finalize_gradients(model)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def expected(world, *, counts_all):
    """One process. A window is divided by the number of ranks that have a batch when it ends."""
    model = seeded(net(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    last = max(COUNTS[:world]) - 1
    for number in range(last + 1):
        having = [rank for rank in range(world) if number < COUNTS[rank]]
        for rank in having:
            loss_of(model, batch_of(rank, number)).backward()
        if ends_window(number) or number == last:
            by_hand = not ends_window(number)  # outside of the loop
            for param in model.parameters():
                param.grad /= world if counts_all or by_hand else len(having)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def train_in_backward():
    """Units are stepped in the backwards that end a window, on ranks without a batch too."""
    model = replicated()[0]
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9)
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        if batch is not None:
            around_both(model, number, batch)
        if ends_window(number):
            optimizer.step()
    meshard.finalize_gradients(model)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_units_are_stepped_in_backward(run_ranks):
    for params in run_ranks(train_in_backward, 4):
        for param, wanted in zip(params, expected(4, counts_all=False), strict=True):
            torch.testing.assert_close(param, wanted)


WAYS = [around_both, around_the_backward, by_a_setter, in_parts]


@spread(run=WAYS, world=[2, 4], counts_all=[False, True])
def test_a_rank_without_a_batch_accumulates_as_the_others_do(run_ranks, run, world, counts_all):
    options = {"divide_by_initial_world_size": True} if counts_all else {}
    results = run_ranks(train, world, run, options)
    for params in results:
        for param, other, wanted in zip(
            params, results[0], expected(world, counts_all=counts_all), strict=True
        ):
            assert torch.equal(param, other)
            torch.testing.assert_close(param, wanted)


def train_with_buffers():
    """Buffers are sent once per iteration, however often the module runs in it."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    meshard.replicate(model, broadcast_buffers=True, bucket_cap_mb=4e-5)
    for batch in meshard.uneven_batches(model, own_batches()):
        if batch is not None:
            with model.no_sync():
                model(batch).sum().backward()
            model(batch).sum().backward()
        model.zero_grad()
    return [buffer.clone() for buffer in model.buffers()]


def test_a_batch_may_have_several_forwards(run_ranks):
    first, *others = run_ranks(train_with_buffers, 4)
    assert first[2] == 2 * LONGEST  # counted by the rank that has the most batches, in the end
    for buffers in others:
        for buffer, wanted in zip(buffers, first, strict=True):
            assert torch.equal(buffer, wanted)


# --- where ranks do not fit together -------------------------------------------------------------


def skip(model, loss):
    pass


def run_no_backward(model, loss):
    loss()


def reduce_twice(model, loss):
    loss().backward()
    loss().backward()


def keep_after_reducing(model, loss):
    loss().backward()
    with model.no_sync():
        loss().backward()


def keep(model, loss):
    with model.no_sync():
        loss().backward()


SKIPPED = r"rank\(s\) \[.*\] skipped a batch of uneven_batches, or reduced twice for one"
DIFFERENT = r"rank\(s\) \[.*\] reduced gradients fully and rank\(s\) \[.*\] did not"


def run_loop(model, wrong, on_rank, when):
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        model.zero_grad()
        if batch is not None:
            if number == when and dist.get_rank() in on_rank:
                wrong(model, partial(loss_of, model, batch))
            else:
                loss_of(model, batch).backward()


def misuse(wrong, on_rank, message, when, sends_buffers):
    """Every rank raises, those that do it right and those without a batch too."""
    layers = seeded(nn.Sequential(net(), nn.BatchNorm1d(2)), 0)
    model = meshard.replicate(layers, bucket_cap_mb=4e-5, broadcast_buffers=sends_buffers)
    with pytest.raises(RuntimeError, match=message):
        run_loop(model, wrong, on_rank, when)
    model.reset_iter_state()
    loss_of(model, batch_of(0, 0)).backward()  # as before, without the loop
    model.zero_grad()


# Before (0) and after (1) buckets are rebuilt, which is a collective as sending buffers is one.
CASES = [
    (skip, (0,), 0, False),
    (skip, (0, 2), 1, True),
    (run_no_backward, (2,), 1, True),
    (run_no_backward, (0, 2), 0, False),
    (reduce_twice, (0, 2), 0, True),
    (reduce_twice, (0,), 1, False),
    (keep_after_reducing, (0,), 1, False),
    (keep_after_reducing, (2,), 0, True),
    (keep, (2,), 0, False),
    (keep, (0,), 1, True),
]


@pytest.mark.parametrize(("wrong", "on_rank", "when", "sends_buffers"), CASES)
def test_every_rank_raises_if_one_does_not_fit(run_ranks, wrong, on_rank, when, sends_buffers):
    message = DIFFERENT if wrong is keep else SKIPPED
    run_ranks(misuse, 4, wrong, on_rank, message, when, sends_buffers)


def set_a_factor():
    """A divide factor that the body of the loop sets stays; a batch may be None."""
    model, _ = replicated()
    for number, _ in enumerate(meshard.uneven_batches(model, [None] * COUNTS[dist.get_rank()])):
        if number < COUNTS[dist.get_rank()]:
            loss_of(model, batch_of(0, 0)).backward()
        if number == 1:
            model.set_gradient_divide_factor(8.0)
    return [unit.settings.divide_factor for unit in model._meshard_buckets.units]


def test_what_the_body_sets_stays(run_ranks):
    for factors in run_ranks(set_a_factor, 4):
        assert set(factors) == {8.0}


def leave_alike(under_no_sync):
    """All ranks leave the loop where some have no batch any more, before these can join."""
    model, _ = replicated()
    seen = []
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        if number == 2:
            break
        seen.append(batch is not None)
        model.zero_grad()
        if batch is not None:
            with model.no_sync() if under_no_sync else contextlib.nullcontext():
                loss_of(model, batch).backward()
    model.zero_grad()
    model.reset_iter_state()
    loss_of(model, batch_of(0, 0)).backward()  # as before, without the loop
    return seen


@pytest.mark.parametrize("under_no_sync", [False, True])
def test_all_ranks_may_leave_the_loop_alike(run_ranks, under_no_sync):
    for seen, count in zip(run_ranks(leave_alike, 4, under_no_sync), COUNTS, strict=True):
        assert seen == [number < count for number in range(2)]


def leave_alone():
    model, _ = replicated()
    try:
        for batch in meshard.uneven_batches(model, own_batches()):
            if dist.get_rank() == 0:
                break
            if batch is not None:
                loss_of(model, batch).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_are_told_that_one_has_left_the_loop(run_ranks):
    """Rank 1 has no batch: there the loop ends."""
    left = "rank(s) [0] have left a loop over uneven_batches."
    assert run_ranks(leave_alone, 4) == ["", "", left, left]


@on_ranks(2)
def test_a_loop_in_a_loop_is_refused():
    model, _ = replicated()
    for _ in meshard.uneven_batches(model, [1]):
        with pytest.raises(RuntimeError, match="is under way"):
            next(meshard.uneven_batches(model, [1]))
        loss_of(model, batch_of(0, 0)).backward()


@on_ranks(2)
def test_a_copy_that_is_made_in_the_loop_divides_as_any():
    """A copy that is made in the loop divides as a module of its own."""
    model, _ = replicated()
    copies = []
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        if number == 1:
            copies.append(copy.deepcopy(model))
        if batch is not None:
            loss_of(model, batch).backward()
    (ours,), plain = copies, seeded(net(), 0)
    ours.zero_grad()
    loss_of(ours, batch_of(0, 0)).backward()
    loss_of(plain, batch_of(0, 0)).backward()
    for param, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad)


def train_partly_frozen():
    """A bucket without trainable parameters is not reduced: not by ranks without a batch either."""
    model = seeded(net(), 0)
    model[2].requires_grad_(False)
    meshard.replicate(model, bucket_cap_mb=4e-5)
    with meshard.CommLedger() as ledger:
        for batch in meshard.uneven_batches(model, own_batches()):
            if batch is not None:
                loss_of(model, batch).backward()
            model.zero_grad()
    return ledger.counts["all_reduce"]


def test_frozen_buckets(run_ranks):
    assert len(set(run_ranks(train_partly_frozen, 4))) == 1


def scale():
    """A rank without any batch takes part in the step of a scaler."""
    model, optimizer = replicated()
    scaler = meshard.ShardedGradScaler("cpu", init_scale=4.0)
    for batch in meshard.uneven_batches(model, own_batches()):
        if batch is not None:
            scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


def test_a_scaler_where_a_rank_has_no_batch(run_ranks):
    assert run_ranks(scale, 2) == [4.0] * 2


def train_until_one_has_none(model):
    for batch in meshard.uneven_batches(model, own_batches(), throw_on_early_termination=True):
        loss_of(model, batch).backward()


@on_ranks(2)
def test_early_termination_raises_on_every_rank():
    model, _ = replicated()
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] have no batch left"):
        train_until_one_has_none(model)
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(1)
def test_options_are_checked():
    model, _ = replicated()
    with pytest.raises(TypeError, match="throw_on_early_termination must be a bool"):
        meshard.uneven_batches(model, [], throw_on_early_termination=1)
    assert list(meshard.uneven_batches(model, [])) == []
