"""torch's ``dcp.load`` reads our tensors, and we read what ``dcp.save`` has written."""

import argparse
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.runs import (
    Odd,
    assert_same_values,
    check_loads,
    net,
    train,
    trained,
    values_of,
)
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.extras  # torch's checkpoints need NumPy


def load_ours(state, folder):
    """Read the tensors of a commit by torch's own reader."""
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))


def torch_states(model, optimizer, name="optimizer"):
    return dict(zip(("model", name), get_state_dict(model, optimizer), strict=True))


@pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
@on_ranks(2)
def test_dcp_load_reads_ours_and_what_dcp_save_has_written_loads(tmp_path, layout):
    torch.manual_seed(dist.get_rank())
    model, optimizer = trained(layout, 2)
    Checkpointer(tmp_path).save(7, model, optimizer)
    dcp.save({**torch_states(model, optimizer), "step": 8}, checkpoint_id=tmp_path / "theirs")
    expected = values_of(model, optimizer)
    assert check_loads(Checkpointer(tmp_path / "theirs"), layout, expected).step == 8
    other = net(layout, seed=3)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    state = torch_states(other, optimizer)
    groups = state["optimizer"].pop("param_groups")
    del state["model"]["head.weight"]  # tied: in the file under its first name
    load_ours(state, tmp_path / "step-7")
    state["model"]["head.weight"] = state["model"]["embed.weight"]
    optim = {**state["optimizer"], "param_groups": groups}
    set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=optim)
    assert_same_values(values_of(other, optimizer), expected)


@on_ranks(1)
def test_hyperparameters_that_are_tensors_are_read(tmp_path):
    def built(*rates):
        model = nn.Linear(2, 2)
        pairs = zip(model.parameters(), map(torch.tensor, rates), strict=True)
        optimizer = torch.optim.AdamW([{"params": [param], "lr": lr} for param, lr in pairs])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    saved, ours = built(1.0, 2.0), built(3.0, 4.0)
    dcp.save(torch_states(*saved), checkpoint_id=tmp_path / "theirs")
    checkpointer = Checkpointer(tmp_path / "theirs")
    checkpointer.load(*ours)
    model, optimizer = ours
    assert [group["lr"] for group in optimizer.param_groups] == [1, 2]
    one = torch.optim.AdamW(model.parameters(), lr=torch.tensor(7.0))
    with pytest.raises(CheckpointError, match="saved in groups with other hyperparameters"):
        checkpointer.load(model, one)


@on_ranks(1)
def test_an_optimizer_under_another_name_is_told(tmp_path):
    model, optimizer = trained("plain", 2)
    dcp.save(torch_states(model, optimizer, "optim"), checkpoint_id=tmp_path)
    expected = values_of(model, optimizer)
    train(model, optimizer, 1)
    remedy = r"optimizer is not in the checkpoint, but optim is, .* load\(model, optim=optimizer\)"
    with pytest.raises(CheckpointError, match=remedy):
        Checkpointer(tmp_path).load(model, optimizer)
    Checkpointer(tmp_path).load(model, optim=optimizer)
    assert_same_values(values_of(model, optimizer), expected)


class App:
    """The state of a model and an optimizer, as users of torch write it."""

    def __init__(self, model, optimizer):
        self.run = model, optimizer

    def state_dict(self):
        return torch_states(*self.run)

    def load_state_dict(self, state):
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(*self.run, **states)


@on_ranks(2)
def test_a_key_around_model_and_optimizer_is_told(tmp_path):
    model, optimizer = trained("fully_shard", 2)
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=tmp_path)
    expected = values_of(model, optimizer)
    train(model, optimizer, 1)
    with pytest.raises(
        CheckpointError, match=r"saved as app\.model\.\S*; call load\(.*, app=\.\.\.\)"
    ):
        Checkpointer(tmp_path).load(model, optimizer)
    Checkpointer(tmp_path).load(nn.Module(), app=App(model, optimizer))
    assert_same_values(values_of(model, optimizer), expected)


@on_ranks(1)
def test_what_another_part_has_is_not_taken_for_the_model(tmp_path):
    model = nn.Linear(2, 2)
    state = {"model": {"weight": torch.ones(2, 2)}, "ema": {"first.bias": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"loaded\):\n  model\.bias is not in the"):
        Checkpointer(tmp_path).load(model)


@on_ranks(1)
def test_strides_and_extra_state_are_read_both_ways(tmp_path):
    saved, ours, theirs, ema = Odd(7), Odd(0), Odd(0), Odd(0)
    state = saved.state_dict()
    dcp.save({"model": state, "ema": state}, checkpoint_id=tmp_path / "theirs")
    loaded = Checkpointer(tmp_path / "theirs").load(ours, ema=ema)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    Checkpointer(tmp_path).save(1, saved)
    state = {"model": dict(theirs.named_parameters())}
    load_ours(state, tmp_path / "step-1")
    for other in (ours, theirs, ema):
        assert torch.equal(other.weight, saved.weight)
        assert torch.equal(other.image, saved.image)
    for other in (ours, ema):
        assert (other.count, other.amax.item()) == (7, 7.0)


class ByGetattr:
    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


@on_ranks(1)
def test_members_of_enums_that_python_pickles_by_getattr_are_read(tmp_path):
    """As Python 3.11.2 does. Of what is no enum of torch, getattr may run code."""
    saved, loaded = nn.Linear(2, 3), nn.Linear(2, 3)
    encoding, by = metadata._MEM_FORMAT_ENCODING, lambda self, _: (getattr, (type(self), self.name))
    with mock.patch.object(encoding, "__reduce_ex__", by):
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
    Checkpointer(tmp_path).load(loaded)
    assert torch.equal(loaded.weight, saved.weight)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(ByGetattr(list, "append")))
    with pytest.raises(CheckpointError, match=r"refers to builtins\.getattr.*may run code"):
        Checkpointer(tmp_path).load(loaded)


@on_ranks(1)
def test_what_only_its_own_class_can_read_is_named(tmp_path):
    model = nn.Linear(1, 1)
    args = argparse.Namespace(lr=1)
    dcp.save({"model": model.state_dict(), "args": args, "n": 3}, checkpoint_id=tmp_path)
    loaded = Checkpointer(tmp_path).load(model)
    assert (loaded.unreadable, loaded.extra) == (["args"], {"n": 3})
    with pytest.raises(CheckpointError, match="args is not in the checkpoint"):
        Checkpointer(tmp_path).load(model, args={})


@on_ranks(1)
def test_a_path_out_of_the_folder_in_the_metadata_of_torch_is_refused(tmp_path):
    model = nn.Linear(1, 1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run")
    path = tmp_path / "run" / ".metadata"
    (tmp_path / "run" / "__0_0.distcp").rename(tmp_path / "secret.distcp")
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret.distcp"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'\.\./secret\.distcp', which is outside"):
        Checkpointer(tmp_path / "run").load(model)
