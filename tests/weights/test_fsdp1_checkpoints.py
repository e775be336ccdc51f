"""Checkpoints of torch's FSDP1 (FullyShardedDataParallel) go on here."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.support.against_plain import mean_square
from tests.support.models import MlpBlock, MlpStack, seeded
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def by_key(states):
    return dict(zip(("model", "optimizer"), states, strict=True))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer):
    """Train on this rank's batch, the same in every call; return the loss."""
    loss = mean_square(model, dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.extras
@on_ranks(2)
def test_a_checkpoint_of_fsdp1_goes_on_with_the_same_losses(tmp_path):
    folder = tmp_path / "saved"
    mesh = init_device_mesh("cpu", (2,))
    plain = seeded(MlpStack())
    theirs = FullyShardedDataParallel(
        copy.deepcopy(plain),
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = adamw(theirs)
    step(theirs, optimizer), step(theirs, optimizer)
    dcp.save(by_key(get_state_dict(theirs, optimizer)), checkpoint_id=folder)
    full = get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True))

    ours = shard_blocks(copy.deepcopy(plain), mesh)
    own = adamw(ours)
    state = by_key(get_state_dict(ours, own))
    dcp.load(state, checkpoint_id=folder)
    model_state, optimizer_state = state.values()
    set_state_dict(ours, own, model_state_dict=model_state, optim_state_dict=optimizer_state)

    for name, param in ours.named_parameters():
        assert torch.equal(param.full_tensor(), full[name]), name
    losses = [(step(theirs, optimizer), step(ours, own)) for _ in range(3)]
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-5)
    loaded = shard_blocks(copy.deepcopy(plain), mesh)
    loaded.load_state_dict(full)
    assert step(loaded, adamw(loaded)) == losses[0][1]
