"""torch's ``dcp.load`` reads ours, and we read what ``dcp.save`` has written."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshard.checkpoint import Checkpointer
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
