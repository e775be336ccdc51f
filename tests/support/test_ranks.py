"""The decorators by which a test names its ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rank_pool import RankError
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads


@pytest.mark.parametrize("start", [1, 2])
@on_ranks(2)
def test_processes_run_the_body_with_parameters(start):
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    assert total == 2 * start + 1


@settings(max_examples=3)
@given(start=st.integers(0, 9))
@on_ranks(2)
def test_processes_run_the_body_with_examples_of_hypothesis(start):
    total = torch.tensor(start)
    dist.all_reduce(total)
    assert total == 2 * start


@on_threads(3)
def test_threads_run_the_body():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    assert total == 3


@on_fake_ranks(64, rank=5)
def test_one_of_many_pretended_ranks_runs_the_body():
    assert (dist.get_rank(), dist.get_world_size()) == (5, 64)


@on_ranks(2)
def failing(value):
    assert value == dist.get_rank()


def test_a_failure_names_the_rank_and_its_variables():
    with pytest.raises(RankError, match="rank 1 of 2") as caught:
        failing(0)
    assert "value = 0" in str(caught.value)
