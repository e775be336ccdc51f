"""Checkpoints of format 1, which meshard wrote before format 2, are read and converted.

``files/format-1`` was saved by two ranks with the last commit that wrote format 1: step 1 with all
that ``check_first`` compares, and step 2, of the model only, twice. ``files/format-1.json`` has the
values of their tensors.
"""

import collections
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshard.checkpoint import Checkpointer
from meshard.checkpoint.__main__ import main as command
from tests.checkpoint.runs import Odd, assert_same_values, net, train, values_of

FILES = Path(__file__).parent / "files"
NUM_RANKS = 2  # that have saved
KINDS = {
    "none": None, "flag": True, "number": 2**70, "text": "näme", "inf": float("inf"),
    "third": 1 / 3, "tuple": (1, (2.5, "x")), "set": {3, 1, 2}, "bytes": b"\x00\xff",
    "dict": {1: "a", (2, 3): b"b"}, "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("abca"), "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
    "device": torch.device("cpu"), "array": bytearray(b"xy"),
}  # fmt: skip


def expected():
    return json.loads((FILES / "format-1.json").read_text())


def tensor_of(row):
    dtype = getattr(torch, row["dtype"])
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(row["values"]).view(-1, 2)).view(row["shape"])
    values = torch.float64 if dtype.is_floating_point else dtype
    return torch.tensor(row["values"], dtype=values).to(dtype).view(row["shape"])


def tensors_of(rows):
    return {name: tensor_of(row) for name, row in rows.items()}


class Loader:
    state = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.state = state


def built(layout):
    model = net(layout, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 99)


def check_first(folder, layout):
    """Load step 1, and compare all that is in it."""
    rank, is_as_saved, told = dist.get_rank(), dist.get_world_size() == NUM_RANKS, expected()
    model, optimizer, scheduler = built(layout)
    average, loader = Odd(0), Loader()
    own = {"loader": loader} if is_as_saved else {}
    loaded = Checkpointer(folder).load(
        model, optimizer, step=1, scheduler=scheduler, average=average, **own
    )
    drawn = torch.rand(3)
    assert_same_values(values_of(model, optimizer), tensors_of(told["1"]))
    assert model.head.weight is model.embed.weight
    assert (scheduler.T_max, scheduler.last_epoch, scheduler.base_lrs) == (10, 1, [0.01])
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 0.01
    assert torch.equal(average.weight, Odd(7).weight) and torch.equal(average.image, Odd(7).image)
    assert (average.count, average.amax.tolist()) == (7, [7.0])
    assert (loaded.step, loaded.unexpected, loaded.unreadable) == (1, [], [])
    extra = dict(loaded.extra)
    kinds, tensors = extra.pop("kinds"), extra.pop("tensors")
    assert kinds == KINDS
    assert [type(each) for each in kinds.values()] == [type(each) for each in KINDS.values()]
    for found, row in zip(tensors, told["tensors"], strict=True):
        assert found.dtype == tensor_of(row).dtype and found.shape == tensor_of(row).shape
        assert torch.equal(found.cfloat(), tensor_of(row).cfloat())
    assert extra.pop("tokens") == 123
    if is_as_saved:
        assert (loaded.random, loaded.missing) == ("restored", [])
        assert torch.equal(drawn, tensor_of(told["drawn"][rank]))
        assert extra.pop("position") == rank * 10
        assert extra.pop("noise").tolist() == torch.tensor([0.5 + rank, 1 / 3]).tolist()
        assert loader.state["at"] == rank
        assert loader.state["order"].tolist() == [rank, 1 + rank, 2 + rank]
    else:
        assert loaded.random == "derived"
        assert sorted(text.split()[0] for text in loaded.missing) == ["noise", "position"]
    assert extra == {}
    train(model, optimizer, 1, scheduler)


def check_newest(folder, layout, step=None):
    """Load step 2, which was saved twice."""
    model = net(layout, seed=3)
    loaded = Checkpointer(folder).load(model, step=step)
    assert_same_values(values_of(model), tensors_of(expected()["2"]))
    assert (loaded.step, loaded.extra) == (2, {"tokens": 456})


def check(folder, layout):
    checkpointer = Checkpointer(folder)
    assert (checkpointer.steps(), checkpointer.latest_step()) == ([1, 2], 2)
    check_first(folder, layout)
    check_newest(folder, layout)


def go_on(folder):
    """Save into a run of format 1, as a job does that was updated meanwhile."""
    model, optimizer, _ = built("fully_shard")
    checkpointer = Checkpointer(folder, keep=2)
    checkpointer.load(model)
    train(model, optimizer, 1)
    checkpointer.save(1, model, optimizer, tokens=8)  # after rolling back
    checkpointer.wait()
    assert (checkpointer.steps(), checkpointer.latest_step()) == ([1, 2], 1)
    check_newest(folder, "fully_shard", step=2)
    checkpointer.save(3, model, optimizer, tokens=9)
    checkpointer.wait()
    assert (checkpointer.steps(), checkpointer.latest_step()) == ([1, 3], 3)
    other, optimizer_there, _ = built("fully_shard")
    assert checkpointer.load(other, optimizer_there).extra == {"tokens": 9}
    assert_same_values(values_of(other, optimizer_there), values_of(model, optimizer))


def test_a_run_of_format_1_goes_on_in_its_folder(run_ranks, tmp_path):
    shutil.copytree(FILES / "format-1", tmp_path / "run")
    run_ranks(go_on, 2, tmp_path / "run")


LAYOUTS = [(1, "plain"), (2, "fully_shard"), (2, "plain")]


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_what_format_1_has_loads_bit_for_bit(run_ranks, tmp_path, num_ranks, layout):
    shutil.copytree(FILES / "format-1", tmp_path / "run")
    run_ranks(check, num_ranks, tmp_path / "run", layout)


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_what_is_imported_loads_as_the_old_folder_does(run_ranks, tmp_path, num_ranks, layout):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(FILES / "format-1", old)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert command(["import", str(old), str(new)]) == 0
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    for step in (1, 2):
        assert Checkpointer(new).verify(step) == []
    names = {path.name for path in new.rglob("*")}
    assert not names & {".metadata", "objects.distcp", "__0_0.distcp"}
    run_ranks(check, num_ranks, new, layout)
