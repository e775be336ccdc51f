"""A run that goes wrong is noticed: on processes, on threads, and where values are compared."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from meshard._torch.private import all_gather_single
from tests.support.parity import assert_same
from tests.support.rank_pool import RankError
from tests.support.thread_group import DeadlockError
from tests.support.threads import ThreadRankError, run_threads

SLOW = pytest.mark.slow


def fails():
    number = 41 + dist.get_rank()
    assert dist.get_rank() != 1, f"number is {number}"
    dist.barrier()


def hangs():
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.barrier()


def dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def warns():
    warnings.warn("careful", UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (fails, r"rank 1 of 2: AssertionError: number is 42(?s:.)*number = 42"),
        (warns, "rank 1 of 2: UserWarning: careful"),
        pytest.param(hangs, r"rank 1 of 2: no answer in 5 s(?s:.)*in hangs", marks=SLOW),
        pytest.param(dies, "rank 1 of 2: the process died with exit code 7", marks=SLOW),
    ],
)
def test_a_process_that_fails_is_named_and_the_next_call_has_all_of_them(run_ranks, act, match):
    with pytest.raises(RankError, match=match):
        run_ranks(act, 2, timeout=5)
    assert run_ranks(dist.get_rank, 4) == [0, 1, 2, 3]


def gather():
    gathered, mine = torch.zeros(2), torch.full((1,), float(dist.get_rank()))
    return all_gather_single(gathered, mine, async_op=True), mine, gathered


def frees_an_input():
    work, mine, _ = gather()
    mine.untyped_storage().resize_(0)
    work.wait()


def returns_early():
    if dist.get_rank() != 1:
        dist.barrier()


def sends_another_shape():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.parametrize(
    ("act", "match", "cause"),
    [
        (fails, "rank 1 of 2: AssertionError: number is 42", AssertionError),
        (returns_early, r"rank 0 waits in barrier #0 .* for ranks \[1\]", DeadlockError),
        (sends_another_shape, r"rank \d calls .* where rank \d calls", RuntimeError),
        (frees_an_input, "freed before all_gather #0 .* was waited for", RuntimeError),
        (gather, "never waited for: rank 0: all_gather #0", type(None)),
    ],
)
def test_a_thread_that_fails_is_named_and_ends_the_others(act, match, cause):
    with pytest.raises(ThreadRankError, match=match) as caught:
        run_threads(act, 2)
    assert type(caught.value.__cause__) is cause


@pytest.mark.parametrize("overwrites", [False, True])
def test_on_threads_a_use_before_the_wait_spoils_the_result(overwrites):
    def step():
        work, mine, gathered = gather()
        early = gathered.clone()
        if overwrites:
            mine.fill_(9)
        work.wait()
        return early.isnan().all(), gathered.tolist()

    for early_is_nan, gathered in run_threads(step, 2):
        assert early_is_nan
        assert 9.0 in gathered if overwrites else gathered == [0.0, 1.0]


def test_a_difference_names_the_parameter():
    one = torch.ones(3)
    assert_same({"a": one + 1e-6}, {"a": one})
    for found, match in [(one + 1e-4, "'grads' 'a': "), (None, "'grads' 'a': None is not tensor")]:
        with pytest.raises(AssertionError, match=match):
            assert_same({"grads": {"a": found}}, {"grads": {"a": one}})
    with pytest.raises(AssertionError, match="'a': "):
        assert_same({"a": one + 1e-6}, {"a": one}, bitwise=True)
    with pytest.raises(AssertionError, match=r"names differ: \['b'\]"):
        assert_same({"a": one}, {"a": one, "b": one})
