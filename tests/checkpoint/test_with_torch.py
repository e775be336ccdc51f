"""torch's ``dcp.load`` reads ours, and we read what ``dcp.save`` has written."""

import argparse
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.runs import assert_same_values, net, train, values_of
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.extras  # torch's checkpoints need NumPy


def trained(layout):
    model = net(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
@on_ranks(2)
def test_dcp_load_reads_ours(tmp_path, layout):
    model, optimizer = trained(layout)
    Checkpointer(tmp_path).save(7, model, optimizer)
    expected = values_of(model, optimizer)
    other = net(layout, seed=3)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    states = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    state = {**states, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "step-7")
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert state["step"] == 7
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    assert_same_values(values_of(other, other_optimizer), expected)


@pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
@on_ranks(2)
def test_what_dcp_save_has_written_loads(tmp_path, layout):
    model, optimizer = trained(layout)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "step": 7}, checkpoint_id=tmp_path)
    expected = values_of(model, optimizer)
    other = net(layout, seed=3)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    loaded = Checkpointer(tmp_path).load(other, other_optimizer)
    assert loaded.step == 7
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    assert_same_values(values_of(other, other_optimizer), expected)


class Odd(nn.Module):
    """A transposed parameter, and extra state."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t() + value)
        self.image = nn.Parameter(
            (torch.arange(16.0).view(1, 4, 2, 2) + value).to(memory_format=torch.channels_last)
        )
        self.count = value

    def get_extra_state(self):
        return {"count": self.count, "amax": torch.tensor([float(self.count)])}

    def set_extra_state(self, state):
        self.count, self.amax = state["count"], state["amax"]


@on_ranks(1)
def test_an_optimizer_under_another_name_is_told(tmp_path):
    model, optimizer = trained("plain")
    states = zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)
    dcp.save(dict(states), checkpoint_id=tmp_path)
    expected = values_of(model, optimizer)
    train(model, optimizer, 1)
    remedy = r"optimizer is not in the checkpoint, but optim is, .* load\(model, optim=optimizer\)"
    with pytest.raises(CheckpointError, match=remedy):
        Checkpointer(tmp_path).load(model, optimizer)
    Checkpointer(tmp_path).load(model, optim=optimizer)
    assert_same_values(values_of(model, optimizer), expected)


@on_ranks(1)
def test_tensors_with_strides_and_extra_state_of_torch_load(tmp_path):
    saved, other = Odd(7), Odd(0)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
    loaded = Checkpointer(tmp_path).load(other)
    assert torch.equal(other.weight, saved.weight)
    assert torch.equal(other.image, saved.image)
    assert (other.count, other.amax.item()) == (7, 7.0)
    assert (loaded.missing, loaded.unexpected) == ([], [])


@on_ranks(1)
def test_dcp_load_reads_extra_state_of_ours(tmp_path):
    Checkpointer(tmp_path).save(1, Odd(7))
    other = Odd(0)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    other.load_state_dict(state["model"])
    assert (other.count, other.amax.item()) == (7, 7.0)
    assert torch.equal(other.weight, Odd(7).weight)


@on_ranks(2)
def test_dcp_load_reads_the_optimizers_of_all_stages(tmp_path):
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    stage[f"stage{rank}"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    Checkpointer(tmp_path).save(1, stage, optimizer)
    metadata = dcp.FileSystemReader(tmp_path / "step-1").read_metadata()
    paths = set(metadata.planner_data.values())
    for each in range(2):
        name = f"stage{each}.weight"
        assert ("model", name) in paths
        assert ("optimizer", "state", name, "momentum_buffer") in paths


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
