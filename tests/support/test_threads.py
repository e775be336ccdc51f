"""Ranks that are threads: they communicate as processes do, and misuse is an error."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshard._torch.private import all_gather_single
from tests.support.thread_group import DeadlockError
from tests.support.threads import ThreadRankError, run_threads


def _mine(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype) + dist.get_rank()


def test_an_output_is_unusable_until_its_wait():
    def step():
        gathered = torch.zeros(2)
        work = all_gather_single(gathered, _mine(0), async_op=True)
        early = gathered.clone()
        work.wait()
        assert work.is_completed()
        return early.isnan().all().item(), gathered.tolist()

    assert run_threads(step, 2) == [(True, [0.0, 1.0])] * 2


def test_an_input_overwritten_before_the_wait_spoils_the_result():
    def step():
        gathered, mine = torch.zeros(2), _mine(0)
        work = all_gather_single(gathered, mine, async_op=True)
        mine.fill_(9)
        work.wait()
        return gathered.tolist()

    for result in run_threads(step, 2):
        assert 9.0 in result


def test_an_input_freed_before_the_wait_is_told():
    def step():
        gathered, mine = torch.zeros(2), _mine(0)
        work = all_gather_single(gathered, mine, async_op=True)
        mine.untyped_storage().resize_(0)
        work.wait()

    with pytest.raises(ThreadRankError, match=r"freed before all_gather #0 .* was waited for"):
        run_threads(step, 2)


def test_a_failure_names_its_rank_and_ends_the_others():
    def step():
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(ThreadRankError, match=r"rank 1 of 4: KeyError: 'lost'") as caught:
        run_threads(step, 4)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_rank_that_returns_early_is_a_deadlock():
    def step():
        if dist.get_rank() != 2:
            dist.barrier()

    with pytest.raises(
        ThreadRankError, match=r"rank 0 waits in barrier #0 .* for ranks \[2\]"
    ) as c:
        run_threads(step, 3)
    assert isinstance(c.value.__cause__, DeadlockError)


def test_ranks_that_wait_for_each_other_on_two_groups_are_a_deadlock():
    def step():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        order = ("replicate", "shard") if dist.get_rank() % 3 else ("shard", "replicate")
        for axis in order:
            dist.barrier(group=mesh.get_group(axis))

    with pytest.raises(ThreadRankError, match="deadlock: rank 0 waits in barrier"):
        run_threads(step, 4)


def test_ranks_that_call_different_collectives_are_told():
    def step():
        if dist.get_rank():
            dist.all_reduce(torch.ones(2))
        else:
            dist.barrier()

    with pytest.raises(ThreadRankError, match=r"rank \d calls .* where rank \d calls"):
        run_threads(step, 2)


def test_a_work_never_waited_for_is_told():
    def step():
        dist.all_reduce(torch.ones(2), async_op=True)

    with pytest.raises(ThreadRankError, match=r"never waited for: rank 0: all_reduce #0"):
        run_threads(step, 2)
    run_threads(step, 2, may_leave_unwaited=True)


def test_meshes_of_different_runs_are_never_equal():
    def step():
        mesh = init_device_mesh("cpu", (2,))
        assert mesh == init_device_mesh("cpu", (2,))
        return mesh

    meshes = [mesh for _ in range(4) for mesh in run_threads(step, 2)]
    assert len(set(meshes)) == len(meshes)
