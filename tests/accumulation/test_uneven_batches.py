"""Uneven batches: ranks with fewer of them train like the others."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.replicated import bucket_sizes
from tests.support.spread import spread
from tests.support.strategies import MODES

COUNTS = [3, 0, 5, 1]  # batches of each rank
LONGEST = max(COUNTS)


def net(*between):
    return seeded(nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 2)))


def batch_of(rank, number):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def own_batches():
    rank = dist.get_rank()
    return [batch_of(rank, number) for number in range(COUNTS[rank])]


def ranks_with(number):
    return [rank for rank, count in enumerate(COUNTS) if number < count]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def replicated(model=None, **options):
    model = meshard.replicate(model or net(), bucket_cap_mb=4e-5, **options)
    assert sum(size > 0 for size in bucket_sizes(model).values()) > 1
    return model


def loss_of(model, batch):
    return model(batch).square().sum()


def context(model, mode):
    return model.no_sync() if mode == "N" else contextlib.nullcontext()


def run_backwards(model, batch, modes):
    """Run F (which reduces) or N (which does not), and for a dot a forward alone."""
    for mode in modes:
        with context(model, mode):
            loss = loss_of(model, batch)
            if mode != ".":
                loss.backward()


def assert_same_on_all_ranks(values):
    for name, value in values.items():
        of_first = value.detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(value, of_first), name


@on_ranks(4)
@pytest.mark.parametrize("factor", [None, 7.0])
def test_ranks_without_a_batch_step_with_the_others(factor):
    plain = net(nn.BatchNorm1d(4))
    model = replicated(copy.deepcopy(plain), broadcast_buffers=True)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizer, num_none = sgd(model), 0
    for batch in meshard.uneven_batches(model, own_batches()):
        if batch is None:
            num_none += 1
        else:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert num_none == LONGEST - COUNTS[dist.get_rank()]
    num_factors = meshard.describe(model).count("divide_factor=7")
    assert num_factors == (0 if factor is None else len(bucket_sizes(model)))

    optimizer = sgd(plain)
    for number in range(LONGEST):
        buffers, after = copy.deepcopy(list(plain.buffers())), None
        for rank in ranks_with(number):
            for buffer, value in zip(plain.buffers(), buffers, strict=True):
                buffer.copy_(value)
            loss = loss_of(plain, batch_of(rank, number))
            (loss / (len(ranks_with(number)) if factor is None else factor)).backward()
            after = after or copy.deepcopy(list(plain.buffers()))
        for buffer, value in zip(plain.buffers(), after, strict=True):
            buffer.copy_(value)  # the first rank that has a batch gives its buffers to all
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain))
    assert_same_on_all_ranks(dict(model.named_parameters()))


def ends_window(number):
    """Windows of two iterations. The last one, of one, is ended by hand."""
    return number % 2 == 1


def around_the_backward(model, batch, mode):
    loss = loss_of(model, batch)
    with context(model, mode):
        loss.backward()


def by_a_setter(model, batch, mode):
    model.set_gradient_sync(MODES[mode])
    loss_of(model, batch).backward()
    model.set_gradient_sync(GradientSync.FULL)


def in_parts(model, batch, mode):
    """Microbatches of one batch, of which the last reduces or not."""
    until_last, parts = GradientSync.REDUCE_SCATTER, batch.chunk(3)
    with meshard.gradient_sync(model, until_last):
        if mode == "F":
            parts = meshard.microbatches(model, parts, until_last=until_last)
        for part in parts:
            loss_of(model, part).backward()


def train_plain_windows(*, counts_all):
    """Divide each window by the number of ranks that have a batch when it ends, or by all."""
    model = net()
    optimizer = sgd(model)
    for number in range(LONGEST):
        for rank in ranks_with(number):
            loss_of(model, batch_of(rank, number)).backward()
        if ends_window(number) or number == LONGEST - 1:
            by_hand = not ends_window(number)  # outside of the loop
            for param in model.parameters():
                param.grad /= len(COUNTS if counts_all or by_hand else ranks_with(number))
            optimizer.step()
            optimizer.zero_grad()
    return full_state(model)


@on_ranks(4)
@spread(run=[run_backwards, around_the_backward, by_a_setter, in_parts], counts_all=[False, True])
def test_a_rank_without_a_batch_accumulates_as_the_others_do(run, counts_all):
    model = replicated()
    optimizer = sgd(model)
    options = {"divide_by_initial_world_size": True} if counts_all else {}
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches(), **options)):
        if batch is not None:
            run(model, batch, "F" if ends_window(number) else "N")
        if ends_window(number):
            optimizer.step()
            optimizer.zero_grad()
        else:
            with pytest.raises(RuntimeError, match="not reduced yet"):
                optimizer.step()  # also on a rank without a batch
    assert number == LONGEST - 1
    meshard.finalize_gradients(model)
    optimizer.step()
    assert_same(full_state(model), train_plain_windows(counts_all=counts_all))
    assert_same_on_all_ranks(full_state(model))


@on_ranks(4)
def test_units_are_stepped_in_the_backward_that_ends_a_window_without_a_batch_too():
    model = replicated()
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9)
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        if batch is not None:
            run_backwards(model, batch, "F" if ends_window(number) else "N")
        if ends_window(number):
            optimizer.step()
    meshard.finalize_gradients(model)
    optimizer.step()
    assert_same(full_state(model), train_plain_windows(counts_all=False))


@on_ranks(4)
def test_buffers_are_sent_once_per_iteration_however_often_the_module_runs_in_it():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    meshard.replicate(model, broadcast_buffers=True, bucket_cap_mb=4e-5)
    for batch in meshard.uneven_batches(model, own_batches()):
        if batch is not None:
            run_backwards(model, batch, "NF")
        model.zero_grad()
    # Counted by the rank that has the most batches, in the end.
    assert model[1].num_batches_tracked == 2 * LONGEST
    assert_same_on_all_ranks(dict(model.named_buffers()))
    model[1].num_batches_tracked.fill_(dist.get_rank())
    model(torch.randn(2, 3))  # after the loop each forward sends them, from the first rank
    assert model[1].num_batches_tracked == 1


# --- where ranks do not fit together -------------------------------------------------------------


SKIPPED = r"rank\(s\) \[.*\] skipped a batch of uneven_batches, or reduced twice for one"
DIFFERENT = r"rank\(s\) \[.*\] reduced gradients fully and rank\(s\) \[.*\] did not"


def assert_trains_without_the_loop(model):
    model.reset_iter_state()
    model.zero_grad()
    loss_of(model, batch_of(0, 0)).backward()


# Before (0) and after (1) buckets are rebuilt, which is a collective as sending buffers is one.
@on_ranks(4)
@pytest.mark.parametrize(
    ("wrong", "on_rank", "when", "sends_buffers"),
    [
        ("", (0,), 0, False),
        ("", (0, 2), 1, True),
        (".", (2,), 1, True),
        (".", (0, 2), 0, False),
        ("FF", (0, 2), 0, True),
        ("FF", (0,), 1, False),
        ("FN", (0,), 1, False),
        ("FN", (2,), 0, True),
        ("N", (2,), 0, False),
        ("N", (0,), 1, True),
    ],
)
def test_every_rank_raises_if_one_does_not_fit(wrong, on_rank, when, sends_buffers):
    """Those that do it right and those without a batch too."""
    model = replicated(nn.Sequential(net(), nn.BatchNorm1d(2)), broadcast_buffers=sends_buffers)

    def loop():
        for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
            model.zero_grad()
            if batch is not None:
                is_wrong = number == when and dist.get_rank() in on_rank
                run_backwards(model, batch, wrong if is_wrong else "F")

    with pytest.raises(RuntimeError, match=DIFFERENT if wrong == "N" else SKIPPED):
        loop()
    assert_trains_without_the_loop(model)


@on_ranks(4)
def test_a_divide_factor_set_in_the_body_stays_and_a_batch_may_be_none():
    model = replicated()
    for number, _ in enumerate(meshard.uneven_batches(model, [None] * COUNTS[dist.get_rank()])):
        if number < COUNTS[dist.get_rank()]:
            loss_of(model, batch_of(0, 0)).backward()
        if number == 1:
            model.set_gradient_divide_factor(8.0)
    assert meshard.describe(model).count("divide_factor=8") == len(bucket_sizes(model))


@on_ranks(4)
@pytest.mark.parametrize("mode", ["F", "N"])
def test_all_ranks_may_leave_the_loop_alike(mode):
    """Some have no batch any more, and leave before these can join."""
    model, seen = replicated(), []
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        if number == 2:
            break
        seen.append(batch is not None)
        model.zero_grad()
        if batch is not None:
            run_backwards(model, batch, mode)
    assert seen == [number < COUNTS[dist.get_rank()] for number in range(2)]
    assert_trains_without_the_loop(model)


@on_ranks(4)
def test_ranks_are_told_that_one_has_left_the_loop():
    """Rank 1 has no batch: there the loop ends."""
    model, rank = replicated(), dist.get_rank()
    left = r"^rank\(s\) \[0\] have left a loop over uneven_batches\.$"
    told = pytest.raises(RuntimeError, match=left) if rank > 1 else contextlib.nullcontext()
    with told:
        for batch in meshard.uneven_batches(model, own_batches()):
            if rank == 0:
                break
            if batch is not None:
                loss_of(model, batch).backward()


@pytest.mark.parametrize("how", ["zero_grad first", "None is skipped", "right"])
@on_ranks(2)
def test_ranks_that_do_not_step_with_the_others_are_told(how):
    """Rank 1 has no batch, and would keep its first values while rank 0 trains."""
    model = replicated()
    optimizer = sgd(model)
    is_right = how == "right"
    text = r"ranks drift apart: in the last iteration .* rank\(s\) \[1\] did not step"
    with contextlib.nullcontext() if is_right else pytest.raises(RuntimeError, match=text):
        for batch in meshard.uneven_batches(model, own_batches()):
            if how == "zero_grad first":
                optimizer.zero_grad()
            if batch is not None:
                loss_of(model, batch).backward()
            elif how == "None is skipped":
                continue
            optimizer.step()
            if how != "zero_grad first":
                optimizer.zero_grad()


@on_ranks(2)
def test_an_error_that_the_body_catches_ends_the_loop_all_the_same():
    model, seen = replicated(), []

    def loop():
        for batch in meshard.uneven_batches(model, [batch_of(0, 0)] * 2):
            seen.append(batch)
            if dist.get_rank():
                run_backwards(model, batch, "N")
                continue
            for _ in range(2):  # the second one must not wait for rank 1, which has left the loop
                with pytest.raises(RuntimeError, match=DIFFERENT):
                    run_backwards(model, batch, "F")

    with pytest.raises(RuntimeError, match=DIFFERENT):
        loop()
    assert len(seen) == 1
    assert_trains_without_the_loop(model)


@on_ranks(2)
def test_a_copy_made_in_the_loop_divides_as_a_module_of_its_own():
    model, plain = replicated(), net()
    for number, batch in enumerate(meshard.uneven_batches(model, own_batches())):
        if number == 1:
            copied = copy.deepcopy(model)
        if batch is not None:
            loss_of(model, batch).backward()
    for each in (copied, plain):
        each.zero_grad()
        loss_of(each, batch_of(0, 0)).backward()
    assert_same(full_grads(copied), full_grads(plain))


@on_ranks(2)
def test_a_rank_without_any_batch_takes_part_in_the_step_of_a_scaler():
    model = replicated()
    optimizer, scaler = sgd(model), meshard.ShardedGradScaler("cpu", init_scale=4.0)
    for batch in meshard.uneven_batches(model, own_batches()):
        if batch is not None:
            scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_early_termination_raises_on_every_rank():
    model, seen = replicated(), []
    batches = [batch_of(dist.get_rank(), 0)] * (2 if dist.get_rank() == 1 else 3)

    def loop():
        for batch in meshard.uneven_batches(model, batches, throw_on_early_termination=True):
            loss_of(model, batch).backward()
            model.zero_grad()
            seen.append(batch)

    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] have no batch left"):
        loop()
    assert len(seen) == 2
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_a_loop_in_a_loop_and_other_modules_are_refused():
    model = replicated()
    for _ in meshard.uneven_batches(model, [1]):
        with pytest.raises(RuntimeError, match="is under way"):
            next(meshard.uneven_batches(model, [1]))
        loss_of(model, batch_of(0, 0)).backward()

    assert list(meshard.uneven_batches(model, [])) == []

    around, partly_sharded = nn.Sequential(model), net()
    meshard.fully_shard(partly_sharded[0])
    meshard.replicate(partly_sharded)
    for other in (around, partly_sharded):
        with pytest.raises(ValueError, match=r"needs a module to which .* of one dummy row.*-100"):
            meshard.uneven_batches(other, [])


@on_ranks(2)
def test_if_the_batches_of_one_rank_raise_the_others_do_not_wait():
    def batches():
        yield torch.ones(1, 2)
        if dist.get_rank() == 0:
            raise OSError("the disk is full")
        yield torch.ones(1, 2)

    model = meshard.replicate(nn.Linear(2, 1))
    loop = meshard.uneven_batches(model, batches())
    model(next(loop)).sum().backward()
    is_first = dist.get_rank() == 0
    error, text = (OSError, "full") if is_first else (RuntimeError, r"rank\(s\) \[0\] passed")
    with pytest.raises(error, match=text):
        next(loop)


@pytest.mark.parametrize("options", [{}, {"clip": "deferred", "max_norm": 1.0}])
@on_ranks(2)
def test_steps_that_a_rank_leaves_out_are_noticed_with_an_optimizer_in_backward(options):
    model = meshard.replicate(nn.Linear(2, 1))
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1, **options)
    if not options:
        optimizer.detach()
    loop = meshard.uneven_batches(model, [torch.ones(1, 2)] * (4 - 3 * dist.get_rank()))
    for batch in itertools.islice(loop, 2):
        if batch is not None:  # the mistake: the second rank does not step in its second iteration
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="ranks drift apart"):
        next(loop)
