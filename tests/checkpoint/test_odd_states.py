"""States that are not the usual ones, and folders that hold something else too."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.layouts import lay_out
from tests.checkpoint.runs import assert_same_values, values_of
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


class Loader:
    """Of which each rank has another state, with a tensor in it."""

    def __init__(self, numel, value):
        self.state = {"at": value, "order": torch.full((numel,), value)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@on_ranks(2)
def test_what_differs_may_be_large_and_of_any_shape(tmp_path):
    rank, checkpointer = dist.get_rank(), Checkpointer(tmp_path)
    for step in (1, 2):  # the second by the plan of the first
        loader = Loader(2**22 + rank, rank + step)
        checkpointer.save(step, nn.Linear(1, 1), loader=loader)
        other = Loader(1, -1)
        checkpointer.load(nn.Linear(1, 1), loader=other)
        assert other.state["at"] == rank + step
        assert torch.equal(other.state["order"], loader.state["order"])
    assert (tmp_path / "step-2" / "manifest.json").stat().st_size < 10_000
    checkpointer.save(3, nn.Linear(1, 1), loader=Loader(5, 8))  # the same on all ranks
    checkpointer.load(nn.Linear(1, 1), loader=loader)
    assert torch.equal(loader.state["order"], torch.full((5,), 8))


@on_ranks(2)
def test_extra_state_of_each_rank_comes_back_to_it(tmp_path):
    class Scaled(nn.Linear):
        amax = torch.zeros(2)

        def get_extra_state(self):
            return {"amax": self.amax}

        def set_extra_state(self, state):
            self.amax = state["amax"]

    model, checkpointer = Scaled(1, 1), Checkpointer(tmp_path)
    model.amax = torch.full((2,), float(dist.get_rank()))
    checkpointer.save(1, model)
    other = Scaled(1, 1)
    loaded = checkpointer.load(other)
    assert torch.equal(other.amax, model.amax)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    with pytest.raises(CheckpointError, match=r"model\._extra_state is in the checkpoint, and not"):
        checkpointer.load(nn.Linear(1, 1))


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


# --- what a reader found -------------------------------------------------------------------


def test_folders_of_others_stay_if_they_have_only_folders_in_them(tmp_path):
    (tmp_path / "step-7" / "rank0").mkdir(parents=True)
    (tmp_path / "step-7" / "rank0" / "weights").write_text("mine")
    Checkpointer(tmp_path).save(1, nn.Linear(1, 1))
    assert (tmp_path / "step-7" / "rank0" / "weights").read_text() == "mine"


def test_the_folder_of_a_step_is_not_read_as_one_of_torch(tmp_path):
    Checkpointer(tmp_path).save(1, nn.Linear(1, 1), tokens=3)
    with pytest.raises(CheckpointError, match="is the folder of one step; pass the folder that"):
        Checkpointer(tmp_path / "step-1").load(nn.Linear(1, 1))


def test_a_plain_value_that_was_not_saved_is_missing(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="tokens is not in the checkpoint"):
        checkpointer.load(nn.Linear(1, 1), tokens=0)
    assert checkpointer.load(nn.Linear(1, 1), tokens=0, strict=False).missing == ["tokens"]


def test_a_part_of_another_kind_is_refused(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    checkpointer.save(1, model, average=nn.Linear(1, 1), second=optimizer, rate=3)
    for extra in ({"average": Loader(1, 1)}, {"second": Loader(1, 1)}, {"rate": optimizer}):
        with pytest.raises(CheckpointError, match=r"was (not )?saved as a"):
            checkpointer.load(model, strict=False, **extra)


@on_ranks(2)
def test_wrong_arguments_of_one_rank_leave_no_other_waiting(tmp_path):
    checkpointer, rank = Checkpointer(tmp_path), dist.get_rank()
    with pytest.raises(CheckpointError, match="rank 1: step must be an integer"):
        checkpointer.save(-1 if rank else 1, nn.Linear(1, 1))
    name = "model.weight" if rank else "note"
    with pytest.raises(CheckpointError, match=r"rank 1: 'model\.weight' is no name"):
        checkpointer.save(1, nn.Linear(1, 1), **{name: 1})
    checkpointer.save(1, nn.Linear(1, 1), note=1)
    with pytest.raises(CheckpointError, match="'random' has a meaning"):
        checkpointer.load(nn.Linear(1, 1), **({"random": 1} if rank else {"note": 1}))


@on_ranks(2)
def test_dtypes_that_differ_between_ranks_are_refused(tmp_path):
    model = nn.Module()
    dtype = torch.bfloat16 if dist.get_rank() else torch.float16
    model.register_buffer("table", torch.ones(2**25, dtype=dtype))  # two chunks
    with pytest.raises(CheckpointError, match=r"ranks hold 'model\.table' with shape .* in "):
        Checkpointer(tmp_path).save(1, model)


@on_ranks(2)
def test_ties_of_a_stage_are_kept(tmp_path):
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"{rank}{key}": nn.Linear(2, 2, bias=False) for key in "ab"})
    stage[f"{rank}b"].weight = stage[f"{rank}a"].weight
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, stage)
    assert checkpointer.manifest().ties == {
        f"model.{each}b.weight": f"model.{each}a.weight" for each in range(2)
    }


@pytest.mark.parametrize("how", ["tensor of a hook", "DTensor of a hook"])
@on_ranks(2)
def test_what_a_hook_adds_to_the_state_dict_is_saved_as_tensors(tmp_path, how):
    model, rank = nn.Linear(1, 1), dist.get_rank()
    added = torch.full((2,), float(rank))
    if how == "DTensor of a hook":
        mesh = init_device_mesh("cpu", (2,))
        added = DTensor.from_local(added, mesh, [Shard(0)])
    hook = lambda module, state, prefix, local: state.update(added=added)  # noqa: E731
    model.register_state_dict_post_hook(hook)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    shapes = {
        name: each.shape
        for name, each in checkpointer.manifest().tensors.items()
        if name.endswith("added")
    }
    if how == "DTensor of a hook":
        assert shapes == {"model.added": (4,)}
    else:
        assert shapes == {"rank0/model.added": (2,), "rank1/model.added": (2,)}
    checkpointer.load(model)


@on_ranks(2)
def test_a_module_that_is_unsharded_saves_its_shards_and_does_not_load(tmp_path):
    model = meshard.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpointer = Checkpointer(tmp_path)
    model.unshard()
    checkpointer.save(1, model, optimizer)
    assert checkpointer.manifest().tensors["model.weight"].placements == ["S(0)"]
    with pytest.raises(CheckpointError, match=r"model is unsharded by unshard\(\).*reshard\(\)"):
        checkpointer.load(model, optimizer)
    model.reshard()
    checkpointer.load(model, optimizer)


@on_ranks(2)
def test_what_a_forward_has_left_unsharded_is_gathered_anew_after_a_load(tmp_path):
    model = meshard.fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
    checkpointer, x = Checkpointer(tmp_path), torch.ones(1, 4)
    checkpointer.save(1, model)
    with torch.no_grad():
        expected = model(x)
        for param in model.parameters():
            param.zero_()
        model(x)
        checkpointer.load(model)
        assert torch.equal(model(x), expected)


@on_ranks(3)
def test_a_group_without_the_first_rank_saves_all(tmp_path):
    group = dist.new_group([1, 2])
    if dist.get_rank():
        checkpointer = Checkpointer(tmp_path, process_group=group)
        checkpointer.save(1, nn.Linear(1, 1), note={"a": [1, 2]})
        assert checkpointer.load(nn.Linear(1, 1)).extra == {"note": {"a": [1, 2]}}
        assert checkpointer.verify() == []
        names = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-1").read_metadata()
        assert "step" in names.state_dict_metadata


def test_keys_with_dots_and_many_numbers_are_saved_in_no_time(tmp_path):
    tree = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "n": {str(n): n for n in range(20000)},
    }
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1), tree=tree)
    assert (tmp_path / "step-1" / "objects.distcp").stat().st_size < 10_000
    extra = checkpointer.load(nn.Linear(1, 1)).extra["tree"]
    assert extra["n"] == tree["n"]
    assert (extra["a.b"], extra["a"]["b"]) == (1, 0)


@on_ranks(4)
def test_tensor_parallel_layouts_come_back(tmp_path):
    model, _ = lay_out("tensor_parallel")
    expected = values_of(model)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpointer.load(model)
    assert_same_values(values_of(model), expected)
