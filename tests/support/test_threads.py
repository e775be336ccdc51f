"""Ranks that are threads: they communicate as processes do, and misuse is an error."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshard._torch.private import all_gather_single, reduce_scatter_single
from tests.support.rendezvous import DeadlockError
from tests.support.threads import ThreadRankError, run_threads


def _mine(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype) + dist.get_rank()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_collectives_compute_what_their_names_say(dtype):
    def step():
        size = dist.get_world_size()
        gathered = torch.empty(size, dtype=dtype)
        all_gather_single(gathered, _mine(0, dtype=dtype))
        scattered = torch.empty(1, dtype=dtype)
        reduce_scatter_single(scattered, torch.arange(size, dtype=dtype))
        exchanged = torch.empty(size, dtype=dtype)
        dist.all_to_all_single(exchanged, _mine(*[0] * size, dtype=dtype))
        reduced = _mine(1, dtype=dtype)
        dist.all_reduce(reduced)
        return [gathered.tolist(), scattered.item(), exchanged.tolist(), reduced.item()]

    for rank, result in enumerate(run_threads(step, 3)):
        assert result == [[0, 1, 2], 3 * rank, [0, 1, 2], 6]


def test_uneven_all_to_all_sends_each_rank_its_rows():
    def step():
        rank = dist.get_rank()
        sent = torch.full((3, 2), float(rank))  # one row to rank 0, two to rank 1
        received = torch.empty(2 * (rank + 1), 2)
        dist.all_to_all_single(received, sent, [rank + 1] * 2, [1, 2])
        return received[:, 0].tolist()

    assert run_threads(step, 2) == [[0, 1], [0, 0, 1, 1]]


@pytest.mark.extras
def test_objects_and_lists_travel():
    def step():
        rank = dist.get_rank()
        objects = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        sent = [f"from {rank}"]
        dist.broadcast_object_list(sent, src=1)
        listed = [torch.empty(1) for _ in range(3)]
        dist.all_gather(listed, _mine(5))
        return [o["rank"] for o in objects], sent[0], torch.cat(listed).tolist()

    assert run_threads(step, 3) == [([0, 1, 2], "from 1", [5, 6, 7])] * 3


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


def test_writing_an_output_does_not_bump_its_version():
    def step():
        gathered = torch.zeros(2)
        before = gathered._version
        all_gather_single(gathered, _mine(0))
        return gathered._version - before

    assert run_threads(step, 2) == [0, 0]


def test_works_started_in_another_order_than_waited_for_are_matched():
    def step():
        first, second = torch.ones(1), torch.full((1,), 10.0)
        works = [dist.all_reduce(t, async_op=True) for t in (first, second)]
        for work in works[:: 1 if dist.get_rank() else -1]:
            work.wait()
        return first.item(), second.item()

    assert run_threads(step, 3) == [(3.0, 30.0)] * 3


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


def test_a_collective_between_tensors_that_do_not_fit_is_told():
    def step():
        all_gather_single(torch.empty(5), torch.empty(2))

    with pytest.raises(ThreadRankError, match="all_gather over 2 ranks cannot turn"):
        run_threads(step, 2)


@given(shape=st.sampled_from([(1, 3), (3, 1), (2, 2), (2, 4)]), rows=st.integers(0, 7))
def test_dtensors_come_back_whole_from_any_mesh(shape, rows):
    def step():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        whole = torch.arange(rows * 2.0).view(rows, 2)
        sharded = distribute_tensor(whole, mesh, (Replicate(), Shard(0)))
        return torch.equal(sharded.full_tensor(), whole)

    assert all(run_threads(step, shape[0] * shape[1]))


def test_meshes_of_different_runs_are_never_equal():
    def step():
        mesh = init_device_mesh("cpu", (2,))
        assert mesh == init_device_mesh("cpu", (2,))
        return mesh

    meshes = [mesh for _ in range(4) for mesh in run_threads(step, 2)]
    assert len(set(meshes)) == len(meshes)


def test_backward_runs_on_the_thread_of_its_rank():
    def step():
        seen = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: seen.append(dist.get_rank()))
        (x * 2).sum().backward()
        return seen

    assert run_threads(step, 4) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_a_sharded_model_trains_like_a_plain_one(shape):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    num_ranks = torch.Size(shape).numel()
    batches = torch.randn(num_ranks, 2, 3)

    def step():
        mine = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in [*mine, mine]:
            fully_shard(layer, mesh=mesh)
        mine(batches[dist.get_rank()]).sum().backward()
        return [p.grad.full_tensor() for p in mine.parameters()]

    (model(batches.flatten(0, 1)).sum() / num_ranks).backward()
    for grads in run_threads(step, num_ranks):
        for grad, param in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)
