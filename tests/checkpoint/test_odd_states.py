"""States that are not the usual ones, and folders that hold something else too."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_tensor_that_differs_between_ranks_comes_back_to_each(tmp_path):
    model, checkpointer = nn.Linear(1, 1), Checkpointer(tmp_path)
    own = torch.tensor([10.0 + dist.get_rank()])
    checkpointer.save(1, model, x=own)
    into = torch.zeros(1)
    checkpointer.load(model, x=into)
    assert torch.equal(into, own)
    assert torch.equal(checkpointer.load(model).extra["x"], own)


@on_ranks(2)
def test_what_differs_and_is_too_large_for_each_rank_is_refused(tmp_path):
    class Loader:
        def state_dict(self):
            return {"order": torch.full((2**22,), dist.get_rank())}

        def load_state_dict(self, state): ...

    with pytest.raises(CheckpointError, match="'loader' differs between ranks and has more than"):
        Checkpointer(tmp_path).save(1, nn.Linear(1, 1), loader=Loader())


@on_ranks(2)
def test_statistics_of_one_rank_are_not_mixed_with_those_of_another(tmp_path):
    model = meshard.fully_shard(nn.BatchNorm1d(4))
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    checkpointer.load(model)
    assert {int(value) for buffer in model.buffers() for value in buffer.flatten()} == {1}


@on_ranks(2)
def test_an_extra_of_one_rank_only_is_named_on_all(tmp_path):
    extra = {"note": 1} if dist.get_rank() else {}
    with pytest.raises(CheckpointError, match=r"rank\(s\) \[0\] do not save 'note'"):
        Checkpointer(tmp_path).save(1, nn.Linear(1, 1), **extra)


@on_ranks(2)
def test_any_error_of_one_rank_is_raised_on_all(tmp_path):
    class Scheduler:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            if dist.get_rank():
                raise LookupError("cannot take it")

    checkpointer, scheduler = Checkpointer(tmp_path), Scheduler()
    checkpointer.save(1, nn.Linear(1, 1), scheduler=scheduler)
    with pytest.raises(CheckpointError, match="rank 1: LookupError: cannot take it"):
        checkpointer.load(nn.Linear(1, 1), scheduler=scheduler)


@on_ranks(2)
def test_stages_of_a_pipeline_are_one_checkpoint(tmp_path):
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    stage[f"stage{rank}"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    expected = stage[f"stage{rank}"].weight.detach().clone()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, stage, optimizer)
    nn.init.zeros_(stage[f"stage{rank}"].weight)
    checkpointer.load(stage, optimizer)
    assert torch.equal(stage[f"stage{rank}"].weight, expected)
    assert len(checkpointer.manifest().parts["optimizer"]["state"]) == 4


def test_complex_views_empty_tensors_and_extra_state(tmp_path):
    class Odd(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 4j]).conj() * 1)
            self.conjugate = torch.full((2,), value + 1j).conj()
            self.register_buffer("empty", torch.zeros(0, 3))
            self.count = value

        def get_extra_state(self):
            return torch.tensor(self.count)

        def set_extra_state(self, state):
            self.count = int(state)

    checkpointer, odd = Checkpointer(tmp_path), Odd(7)
    checkpointer.save(1, odd)
    other = Odd(2)
    loaded = checkpointer.load(other)
    assert torch.equal(other.conjugate.resolve_conj(), odd.conjugate.resolve_conj())
    assert (other.count, loaded.missing, loaded.unexpected) == (7, [], [])


def test_plain_values_keep_their_order_and_are_returned_whatever_is_passed(tmp_path):
    mix = {"web": 1, "books": 2, "code": {1.5: float("nan")}}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1), mix=mix)
    extra = checkpointer.load(nn.Linear(1, 1), mix={}).extra
    assert list(extra["mix"]) == ["web", "books", "code"]


def test_two_tensors_do_not_load_into_one(tmp_path):
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, tied)
    tied[1].weight = tied[0].weight
    with pytest.raises(CheckpointError, match="are tied here, and were saved as 2 tensors"):
        checkpointer.load(tied)


def test_what_others_have_in_the_folder_stays(tmp_path):
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "notes.txt").write_text("mine")
    (tmp_path / "step-008").mkdir()
    checkpointer = Checkpointer(tmp_path, keep=1)
    for step in (7, 8, 9):
        checkpointer.save(step, nn.Linear(1, 1))
    checkpointer.wait()
    assert checkpointer.steps() == [9]
    assert (tmp_path / "step-7" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-008").exists()


def test_a_step_before_the_newest_stays_and_warns(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(300, nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="step 110 was saved beside step 300"):
        checkpointer.save(110, nn.Linear(1, 1))
    assert checkpointer.steps() == [110, 300]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("run")
    checkpointer.save(1, nn.Linear(1, 1))
    monkeypatch.chdir(os.sep)
    assert checkpointer.latest_step() == 1


@on_ranks(2)
def test_a_warning_that_is_an_error_leaves_no_rank_waiting(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(300, nn.Linear(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if dist.get_rank() == 0:
            with pytest.raises(UserWarning, match="saved beside step 300"):
                checkpointer.save(110, nn.Linear(1, 1))
        else:
            checkpointer.save(110, nn.Linear(1, 1))
    assert checkpointer.steps() == [110, 300]
