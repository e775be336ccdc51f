"""The pool of ranks: functions run on it, and failures name the rank."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_pool import RankError


def _who():
    total = torch.ones(())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def _fails_on(rank):
    number = 41 + dist.get_rank()
    assert dist.get_rank() != rank, f"number is {number}"
    dist.barrier()


def _hangs():
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.barrier()


def _dies():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def _warns():
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_a_failure_names_the_rank_and_shows_its_traceback_and_variables(run_ranks):
    with pytest.raises(RankError, match=r"rank 1 of 3: AssertionError: number is 42") as caught:
        run_ranks(_fails_on, 3, 1)
    assert "assert dist.get_rank() != rank" in str(caught.value)
    assert "number = 42" in str(caught.value)
    assert len(run_ranks(_who, 2)) == 2


@pytest.mark.slow
def test_a_hang_ends_at_the_timeout_and_shows_where_each_rank_is(run_ranks):
    with pytest.raises(RankError, match=r"rank 1 of 2: no answer in 1 s") as caught:
        run_ranks(_hangs, 2, timeout=1)
    assert "in _hangs" in str(caught.value)
    assert len(run_ranks(_who, 4)) == 4


@pytest.mark.slow
def test_a_dead_process_is_told_and_replaced(run_ranks):
    with pytest.raises(RankError, match=r"rank 0 of 2: the process died with exit code 7"):
        run_ranks(_dies, 2)
    assert len(run_ranks(_who, 4)) == 4


def test_warnings_are_errors_on_the_ranks(run_ranks):
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(_warns, 1)
