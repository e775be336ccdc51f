"""Uneven batches with accumulation, with options, and where ranks do not fit together."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.models import seeded

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


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("counts_all", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("run", WAYS)
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


def run_loop(model, wrong, on_rank):
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        model.zero_grad()
        if batch is not None:
            if number == 1 and dist.get_rank() in on_rank:
                wrong(model, partial(loss_of, model, batch))
            else:
                loss_of(model, batch).backward()


def misuse(wrong, on_rank, message):
    """Every rank raises, those that do it right and those without a batch too."""
    model, _ = replicated()
    with pytest.raises(RuntimeError, match=message):
        run_loop(model, wrong, on_rank)
    model.reset_iter_state()
    loss_of(model, batch_of(0, 0)).backward()  # as before, without the loop
    model.zero_grad()


CASES = [
    (wrong, on_rank)
    for wrong in (skip, run_no_backward, reduce_twice, keep_after_reducing)
    for on_rank in ((0,), (2,), (0, 2))
]
CASES += [(keep, (0,)), (keep, (2,))]  # on both it is right


@pytest.mark.default_rows(5)
@pytest.mark.parametrize(("wrong", "on_rank"), CASES)
def test_every_rank_raises_if_one_does_not_fit(run_ranks, wrong, on_rank):
    run_ranks(misuse, 4, wrong, on_rank, DIFFERENT if wrong is keep else SKIPPED)


def train_until_one_has_none(model):
    for batch in meshard.uneven_batches(model, own_batches(), throw_on_early_termination=True):
        loss_of(model, batch).backward()


def end_early():
    model, _ = replicated()
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] have no batch left"):
        train_until_one_has_none(model)
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())


def test_early_termination_raises_on_every_rank(run_ranks):
    run_ranks(end_early, 2)


def check_options():
    model, _ = replicated()
    with pytest.raises(TypeError, match="throw_on_early_termination must be a bool"):
        meshard.uneven_batches(model, [], throw_on_early_termination=1)
    assert list(meshard.uneven_batches(model, [])) == []


def test_options_are_checked(run_ranks):
    run_ranks(check_options, 1)
