"""Ranks that are threads: they communicate as processes do, and misuse is an error."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshard._torch.private import all_gather_single
from tests.support.thread_group import DeadlockError
from tests.support.threads import ThreadRankError, run_threads


def gather():
    """Return an all-gather of the numbers of the ranks, with its input and its output."""
    gathered, mine = torch.zeros(2), torch.full((1,), float(dist.get_rank()))
    return all_gather_single(gathered, mine, async_op=True), mine, gathered


def test_an_output_is_unusable_until_its_wait():
    def step():
        work, _, gathered = gather()
        early = gathered.clone()
        work.wait()
        assert work.is_completed()
        return early.isnan().all().item(), gathered.tolist()

    assert run_threads(step, 2) == [(True, [0.0, 1.0])] * 2


def test_an_input_overwritten_before_the_wait_spoils_the_result():
    def step():
        work, mine, gathered = gather()
        mine.fill_(9)
        work.wait()
        return gathered.tolist()

    for result in run_threads(step, 2):
        assert 9.0 in result


def frees_an_input():
    work, mine, _ = gather()
    mine.untyped_storage().resize_(0)
    work.wait()


def fails_on_a_rank():
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def returns_early():
    if dist.get_rank() != 2:
        dist.barrier()


def waits_on_two_groups_in_another_order():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for axis in ("replicate", "shard") if dist.get_rank() % 3 else ("shard", "replicate"):
        dist.barrier(group=mesh.get_group(axis))


def calls_another_collective():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2))
    else:
        dist.barrier()


def sends_another_shape():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def gathers_into_too_little():
    all_gather_single(torch.zeros(3), torch.ones(2))


def gathers_another_dtype():
    all_gather_single(torch.zeros(4), torch.ones(2, dtype=torch.bfloat16))


def does_not_wait():
    dist.all_reduce(torch.ones(2), async_op=True)


@pytest.mark.parametrize(
    ("step", "num_ranks", "match", "cause"),
    [
        (frees_an_input, 2, r"freed before all_gather #0 .* was waited for", RuntimeError),
        (fails_on_a_rank, 4, r"rank 1 of 4: KeyError: 'lost'", KeyError),
        (returns_early, 3, r"rank 0 waits in barrier #0 .* for ranks \[2\]", DeadlockError),
        (waits_on_two_groups_in_another_order, 4, "deadlock: rank 0 waits in", DeadlockError),
        (calls_another_collective, 2, r"rank \d calls .* where rank \d calls", RuntimeError),
        (sends_another_shape, 2, r"rank \d calls .* where rank \d calls", RuntimeError),
        (gathers_into_too_little, 2, "all_gather over 2 ranks needs", ValueError),
        (gathers_another_dtype, 2, "all_gather over 2 ranks needs", ValueError),
        (does_not_wait, 2, r"never waited for: rank 0: all_reduce #0", None),
    ],
)
def test_misuse_is_told_and_ends_all_ranks(step, num_ranks, match, cause):
    with pytest.raises(ThreadRankError, match=match) as caught:
        run_threads(step, num_ranks)
    assert cause is None or type(caught.value.__cause__) is cause


def test_a_work_may_be_left_unwaited_on_request():
    run_threads(does_not_wait, 2, may_leave_unwaited=True)


def test_meshes_of_different_runs_are_never_equal():
    def step():
        mesh = init_device_mesh("cpu", (2,))
        assert mesh == init_device_mesh("cpu", (2,))
        return mesh

    meshes = [mesh for _ in range(4) for mesh in run_threads(step, 2)]
    assert len(set(meshes)) == len(meshes)
