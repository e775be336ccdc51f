"""``patch_torch``: code that imports torch's fully_shard gets ours, while it should."""

import copy
import importlib

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.compat import patch_torch
from tests.support.ranks import on_fake_ranks, on_threads


def trainer(model):
    """What a library does that knows of torch only."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy())
    return isinstance(model, FSDPModule)


@on_fake_ranks(2)
def test_a_library_that_imports_from_torch_gets_ours_inside_the_block():
    theirs = torch_fsdp.fully_shard
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


@pytest.mark.parametrize(
    "path",
    [
        "torch.distributed.fsdp",
        "torch.distributed.fsdp._fully_shard",
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "torch.distributed._composable.fsdp",
        "torch.distributed._composable.fsdp.fully_shard",
    ],
)
def test_every_module_of_torch_that_has_it_gives_ours(path):
    importlib.import_module(path)
    with patch_torch():
        found = {}
        exec(f"from {path} import fully_shard, register_fsdp_forward_method", found)
    assert found["fully_shard"] is meshard.fully_shard
    assert found["register_fsdp_forward_method"] is meshard.register_fsdp_forward_method


def test_both_replicates_of_torch_stay_torchs():
    from torch.distributed._composable import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp

    with patch_torch():
        from torch.distributed._composable import replicate as patched
        from torch.distributed._composable.replicate_with_fsdp import replicate as patched_by_fsdp
    assert patched is replicate
    assert patched_by_fsdp is by_fsdp


@on_threads(2)
def test_no_offload_policy_is_that_of_torch_without_offload():
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
    meshard.fully_shard(layer, offload_policy=None)
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad.device.type == "cpu"


@on_fake_ranks(2)
def test_trainers_read_the_dtypes_of_a_unit():
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16)
    head = nn.Linear(4, 4)
    meshard.fully_shard(head, mp_policy=policy)
    for layer in (head, copy.deepcopy(head)):
        found = layer._get_fsdp_state()._mp_policy
        assert found.param_dtype is torch.bfloat16
        assert found.reduce_dtype is torch.float32
        assert found.output_dtype is torch.float16
        assert found.cast_forward_inputs is True
