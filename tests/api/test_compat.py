"""``patch_torch``: code that imports torch's fully_shard gets ours, while it should."""

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.compat import patch_torch
from tests.support.fake import fake_group


def trainer(model):
    """What a library does that knows of torch only."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy())
    return isinstance(model, FSDPModule)


def test_a_library_that_imports_from_torch_gets_ours_inside_the_block():
    theirs = torch_fsdp.fully_shard
    with fake_group(2):
        ours, peers = nn.Linear(4, 4), nn.Linear(4, 4)
        with patch_torch():
            assert trainer(ours)
        assert trainer(peers)
    assert isinstance(ours, meshard.FSDPModule)
    assert not isinstance(peers, meshard.FSDPModule)
    assert torch_fsdp.fully_shard is theirs


def test_the_patch_can_be_left_on_and_undone_once():
    theirs = {name: getattr(torch_fsdp, name) for name in ("fully_shard", "share_comm_ctx")}
    patch = patch_torch()
    assert torch_fsdp.fully_shard is meshard.fully_shard
    assert torch_fsdp.share_comm_ctx is meshard.share_comm_ctx
    patch.undo()
    patch.undo()
    assert all(getattr(torch_fsdp, name) is value for name, value in theirs.items())
