"""Where a checkpoint was lost, mixed or waited for in states that are rare."""

import errno
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from meshard.checkpoint.__main__ import main as command
from tests.checkpoint.test_equal_on_ranks import LocalMomentum
from tests.support.models import seeded
from tests.support.ranks import on_ranks, on_threads


def test_a_disk_that_does_not_answer_makes_no_checkpoint_the_oldest(tmp_path):
    checkpointer, model = Checkpointer(tmp_path, keep=2), nn.Linear(1, 1)
    for step in (1, 2):
        checkpointer.save(step, model)
    read = checkpointer._storage.read

    def fail(path):
        if path.startswith("step-2/"):
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with mock.patch.object(checkpointer._storage, "read", fail):
        with pytest.raises(OSError, match="Input/output error"):
            checkpointer.latest_step()
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpointer.save(3, model)
    assert checkpointer.steps() == [1, 2]


@on_ranks(2)
def test_an_expert_that_one_rank_holds_is_refused_or_kept_for_each(tmp_path):
    expert = nn.Linear(2, 2, bias=False)
    nn.init.constant_(expert.weight, dist.get_rank())
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.weight.* differ .*per_rank=True"):
        checkpointer.save(1, expert)
    checkpointer.save(1, expert, per_rank=True)
    nn.init.constant_(expert.weight, 9)
    checkpointer.load(expert)
    assert expert.weight.unique().tolist() == [dist.get_rank()]
    if dist.get_rank() == 0:
        assert command(["export", str(tmp_path), str(tmp_path / "out")]) == 0
        assert command(["export", str(tmp_path), str(tmp_path / "dcp"), "--to", "dcp"]) == 0


@on_ranks(2)
def test_states_of_each_rank_are_refused_where_it_holds_another_part(tmp_path):
    def built(dim):
        layer = seeded(nn.Linear(4, 4, bias=False))
        model = meshard.fully_shard(layer, shard_placement_fn=lambda param: Shard(dim))
        optimizer = LocalMomentum(model.parameters())
        model(torch.arange(4.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    checkpointer = Checkpointer(tmp_path)
    model, optimizer = built(0)
    for state in optimizer.state.values():
        state["momentum"] += dist.get_rank()
    checkpointer.save(1, model, optimizer, per_rank=True)
    checkpointer.load(model, optimizer)
    with pytest.raises(CheckpointError, match="its own states of 'weight', of another part of it"):
        checkpointer.load(*built(1))


@on_threads(2)
def test_ranks_that_hold_halves_and_the_whole_of_one_tensor_are_refused(tmp_path):
    rank = dist.get_rank()
    model = {"w": torch.ones(4) if rank else torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"ranks hold 'model\.w' with shape"):
        Checkpointer(tmp_path).save(1, model)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    model = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match=r"two tensors of a model are called 'model\.a\.b'"):
        Checkpointer(tmp_path).save(1, model)


# torch 2.14 names each group by how many its rank has made or seen, so any further one hangs there.
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 cannot make such a group")
@on_ranks(3)
def test_ranks_in_unequal_numbers_of_groups_save_together(tmp_path):
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, seeded(nn.Linear(1, 1)))
    assert checkpointer.load(nn.Linear(1, 1)).step == 1


@on_ranks(2)
def test_a_failed_save_that_one_rank_was_told_of_is_told_to_all_by_the_next(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), seeded(nn.Linear(1, 1))
    with mock.patch.object(checkpointer._storage, "create", side_effect=OSError(28, "full")):
        handle = checkpointer.async_save(1, model)
        if dist.get_rank():
            with pytest.raises(CheckpointError, match="no space is left"):
                handle.wait()
        else:
            while not handle.done():
                pass
    with pytest.raises(CheckpointError, match=r"the save before has failed(?s:.*)no space is left"):
        checkpointer.save(2, model)
    checkpointer.save(3, model)
    assert checkpointer.steps() == [3]
