"""Nothing that is damaged loads in silence, and what is refused changes nothing."""

import contextlib
import json
import os
import pickle
import re
import shutil
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from meshard.checkpoint.__main__ import main as command
from meshard.checkpoint._protocol import commits, saving, storage
from tests.checkpoint.runs import assert_same_values, net, train, trained, values_of
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import spread


def saved(folder, steps=(1,)):
    model, optimizer = trained("plain")
    for step in steps:
        train(model, optimizer, 1)
        Checkpointer(folder).save(step, model, optimizer, scheduler_step=step)


def assert_refused(folder, text, **options):
    model = net("plain", seed=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, 1)
    before, files = values_of(model, optimizer), sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=text):
        Checkpointer(folder).load(model, optimizer, **options)
    assert_same_values(values_of(model, optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert sorted(folder.rglob("*")) == files


FILES = {"manifest.json": r"manifest\.json", "rank-00000.safetensors": r"rank-00000\.safetensors"}


@spread(part=range(24), file=FILES)
def test_a_flipped_bit_is_named_and_refused(tmp_path, file, part):
    saved(tmp_path)
    path = tmp_path / "step-1" / file
    size = path.stat().st_size
    data = bytearray(path.read_bytes())
    data[part * (size - 1) // 23] ^= 4
    path.write_bytes(data)
    assert_refused(tmp_path, FILES[file])
    assert [each.file for each in Checkpointer(tmp_path).verify()] == [file]


def test_every_byte_of_every_file_has_a_checksum(tmp_path):
    saved(tmp_path)
    found = Checkpointer(tmp_path).manifest()
    for file, ranges in found.files.items():
        end = 0
        for part in ranges:
            assert part.begin == end, file
            end += part.size
        assert end == (tmp_path / "step-1" / file).stat().st_size


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path, file):
    saved(tmp_path)
    path = tmp_path / "step-1" / file
    os.truncate(path, path.stat().st_size // 2)
    assert {each.file for each in Checkpointer(tmp_path).verify()} == {file}
    assert_refused(tmp_path, re.escape(file))
    if file == "rank-00000.safetensors":
        path.unlink()
        assert_refused(tmp_path, re.escape(file))
        assert Checkpointer(tmp_path).verify() == [(file, "is missing")]


def test_files_of_two_steps_that_were_exchanged_are_noticed(tmp_path):
    saved(tmp_path, steps=(1, 2))
    one, two = (tmp_path / f"step-{step}" / "rank-00000.safetensors" for step in (1, 2))
    other = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(other)
    assert_refused(tmp_path, r"rank-00000\.safetensors", step=1)
    assert_refused(tmp_path, r"rank-00000\.safetensors", step=2)


def rewritten(folder, change):
    """Write a manifest anew, with a right checksum."""
    path = folder / "step-1" / "manifest.json"
    content = json.loads(path.read_text())["content"]
    change(content)
    checksum = commits.checksum_of(commits.canonical(content))
    path.write_bytes(commits.canonical({"checksum": checksum, "content": content}))


def test_a_path_out_of_the_folder_and_a_newer_format_are_refused(tmp_path):
    saved(tmp_path)
    rewritten(tmp_path, lambda content: content["files"][0].__setitem__(0, "../../secret"))
    assert_refused(tmp_path, r"'\.\./\.\./secret', which is outside of its folder")
    rewritten(tmp_path, lambda content: content.update(format_version=3))
    assert_refused(tmp_path, r"format 3 of a newer meshard .*\nUpdate meshard|Update meshard")


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    saved(tmp_path, steps=(1, 2))
    (tmp_path / "step-2" / "manifest.json").unlink()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps() == [1]
    assert checkpointer.latest_step() == 1
    assert_refused(tmp_path, r"step 2 is not in .*; there are \[1\]", step=2)
    saved(tmp_path, steps=(3,))
    assert not (tmp_path / "step-2").exists()


def test_other_shapes_dtypes_and_names_are_listed_together(tmp_path):
    Checkpointer(tmp_path).save(0, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1).double(), nn.Linear(1, 1))
    before = values_of(other)
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path).load(other)
    text = str(error.value)
    assert "model.0.weight has shape [3, 2] in the checkpoint and [4, 2] here" in text
    assert "model.1.bias is float32 in the checkpoint and float64 here; pass cast=True" in text
    assert "model.2.weight is not in the checkpoint" in text
    assert "nothing was loaded" in text
    assert_same_values(values_of(other), before)


@pytest.mark.parametrize(
    ("saved", "wanted", "is_cast"),
    [
        ("int64", "int32", False),
        ("float32", "int64", False),
        ("int8", "uint8", False),
        ("int64", "bool", False),
        ("complex64", "float32", False),
        ("float32", "float8_e4m3fn", False),
        ("uint32", "int32", False),
        ("int32", "int64", True),
        ("bool", "int8", True),
        ("int64", "float32", True),
        ("float32", "float64", True),
    ],
)
def test_a_cast_is_made_unless_it_would_wrap_values_or_drop_a_part(
    tmp_path, saved, wanted, is_cast
):
    value = torch.ones(2).to(getattr(torch, saved))
    Checkpointer(tmp_path).save(0, nn.Module(), x=value)
    x = torch.zeros(2).to(getattr(torch, wanted))
    refused = pytest.raises(CheckpointError, match=r"x is .* here; no cast keeps its values")
    with contextlib.nullcontext() if is_cast else refused:
        Checkpointer(tmp_path).load(nn.Module(), x=x, cast=True)
    assert torch.equal(x, value.to(x.dtype) if is_cast else torch.zeros(2).to(x.dtype))


def test_without_strict_what_fits_is_loaded_and_the_rest_is_said(tmp_path):
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    Checkpointer(tmp_path).save(0, plain)
    other = nn.ModuleDict({"0": nn.Linear(2, 3), "new": nn.Linear(1, 1)})
    loaded = Checkpointer(tmp_path).load(other, torch.optim.SGD(other.parameters()), strict=False)
    assert loaded.missing == ["model.new.weight", "model.new.bias", "optimizer"]
    assert loaded.unexpected == ["model.1.bias", "model.1.weight"]
    assert torch.equal(other["0"].weight, plain[0].weight)


def test_a_model_on_meta_is_to_be_materialised_first(tmp_path):
    Checkpointer(tmp_path).save(0, nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"model\.weight is on the meta device here"):
        Checkpointer(tmp_path).load(nn.Linear(2, 3, device="meta"))


def assert_not_saved(checkpointer, text, *args, **extra):
    steps = checkpointer.steps()
    with pytest.raises(CheckpointError, match=text):
        checkpointer.save(*args, **extra)
    assert checkpointer.steps() == steps


@on_ranks(2)
def test_gradients_that_are_pending_on_one_rank_refuse_the_save_on_all(tmp_path):
    model, checkpointer = net("fully_shard"), Checkpointer(tmp_path)
    checkpointer.save(1, model)
    with meshard.no_sync(model):
        model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    assert_not_saved(checkpointer, "step 2 was not saved.*(?s:.*)not reduced yet", 2, model)
    assert not (tmp_path / "step-2").exists()


@on_ranks(2)
def test_a_folder_that_other_ranks_do_not_see_is_told(tmp_path):
    own = tmp_path / str(dist.get_rank())
    own.mkdir()
    text = "rank 1: .*rank-00001.safetensors is not there. All ranks must see one folder"
    assert_not_saved(Checkpointer(own), text, 1, nn.Linear(1, 1))
    assert [path.name for path in own.iterdir() if path.name != ".meshard-lock"] == []


@on_threads(2)
def test_a_store_that_fails_on_the_first_rank_is_told_to_the_others(tmp_path):
    checkpointer, model = Checkpointer(tmp_path), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    checkpointer.save(1, model)
    if dist.get_rank() == 0:
        fail = mock.Mock(side_effect=PermissionError("the credentials have expired"))
        checkpointer._storage.folders = checkpointer._storage.exists = fail
    with pytest.raises(CheckpointError, match="the credentials have expired"):
        checkpointer.load(model)


@on_threads(2)
def test_an_error_while_the_first_rank_makes_the_manifest_is_raised_on_all(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_entries", mock.Mock(side_effect=MemoryError("too many")))
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    assert_not_saved(Checkpointer(tmp_path), "MemoryError: too many", 1, model)


@on_ranks(2)
def test_no_space_left_is_told_and_nothing_is_left_behind(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, nn.Linear(1, 1))

    def write(file, data):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        checkpointer._storage.write = write
    assert_not_saved(checkpointer, "rank 1: no space is left", 2, nn.Linear(1, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".meshard-lock", "step-1"]


def test_a_sync_that_fails_while_the_file_is_written_is_raised(tmp_path, monkeypatch):
    checkpointer, failures = Checkpointer(tmp_path), []
    checkpointer.save(1, nn.Linear(1, 1))
    sync = os.fsync

    def fail_once(descriptor):
        if threading.current_thread().name == "meshard sync" and not failures:
            failures.append(descriptor)
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(storage, "_SYNCED_AT_ONCE", 1)
    assert_not_saved(checkpointer, "rank 0: OSError: .*Input/output error", 2, nn.Linear(1, 1))
    assert failures and checkpointer.steps() == [1]


def test_the_commands_end_with_1_where_nothing_is_or_a_file_is_cut_off(tmp_path, capsys):
    assert command(["verify", str(tmp_path), "--all"]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err
    Checkpointer(tmp_path).save(1, nn.Linear(9, 9))
    assert command(["verify", str(tmp_path), "--all"]) == 0
    os.truncate(tmp_path / "step-1" / "rank-00000.safetensors", 1000)
    assert command(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "rank-00000.safetensors ends before byte" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # the same command may be given again


def test_a_folder_that_another_process_removes_meanwhile_is_gone(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=None)
    checkpointer.save(1, nn.Linear(1, 1))
    (tmp_path / "step-1" / "manifest.json").unlink()  # as prune by hand begins
    is_leftover = commits._is_leftover

    def remove_first(at, folder):
        shutil.rmtree(tmp_path / folder)
        return is_leftover(at, folder)

    monkeypatch.setattr(commits, "_is_leftover", remove_first)
    checkpointer.save(2, nn.Linear(1, 1))
    assert checkpointer.steps() == [2]
    found = checkpointer._folder_of(2)
    shutil.rmtree(tmp_path / "step-2")
    monkeypatch.setattr(checkpointer, "_folder_of", lambda step: found)
    with pytest.raises(CheckpointError, match="step-2 was removed meanwhile"):
        checkpointer.manifest(2)


def test_a_disk_that_does_not_read_is_named_by_verify(tmp_path, monkeypatch):
    saved(tmp_path)

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert {each.file for each in Checkpointer(tmp_path).verify()} == {
        "rank-00000.safetensors",
    }


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_metadata_of_torch_is_not_unpickled_freely(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"refers to posix\.system"):
        Checkpointer(tmp_path).load(nn.Linear(1, 1))
