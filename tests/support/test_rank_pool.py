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


def _tensors(offset, *, scale):
    return {"x": torch.arange(3.0) * scale + offset, "half": torch.ones(2, dtype=torch.bfloat16)}


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


def _variable():
    return os.environ.get("MESHARD_PROBE")


def _pids():
    return os.getpid()


def _random():
    return torch.rand(2)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_rank_has_its_place_in_a_group_of_the_wanted_size(run_ranks, num_ranks):
    expected = [(rank, num_ranks, float(num_ranks)) for rank in range(num_ranks)]
    assert run_ranks(_who, num_ranks) == expected


def test_tensors_go_in_and_come_back(run_ranks):
    results = run_ranks(_tensors, 2, torch.ones(3), scale=2.0)
    for result in results:
        assert torch.equal(result["x"], torch.tensor([1.0, 3.0, 5.0]))
        assert result["half"].dtype == torch.bfloat16


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


def test_the_processes_stay_the_same_from_call_to_call(run_ranks):
    assert run_ranks(_pids, 3) == run_ranks(_pids, 4)[:3]


def test_warnings_are_errors_on_the_ranks(run_ranks):
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(_warns, 1)


def test_settings_of_the_library_reach_the_ranks_and_do_not_stay(run_ranks, monkeypatch):
    monkeypatch.setenv("MESHARD_PROBE", "1")
    assert run_ranks(_variable, 2) == ["1", "1"]
    monkeypatch.delenv("MESHARD_PROBE")
    assert run_ranks(_variable, 2) == [None, None]


def test_ranks_draw_the_same_random_numbers_in_every_call(run_ranks):
    first, again = run_ranks(_random, 2), run_ranks(_random, 2)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], run_ranks(_random, 1, seed=1)[0])
