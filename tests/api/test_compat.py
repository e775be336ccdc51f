"""``patch_torch``: code that imports torch's fully_shard gets ours, while it should."""

import copy
import importlib
import sys

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.compat import patch_torch
from tests.support.ranks import on_fake_ranks


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
    names = ("fully_shard", "share_comm_ctx")
    theirs = [getattr(torch_fsdp, name) for name in names]
    patch = patch_torch()
    assert [getattr(torch_fsdp, n) for n in names] == [getattr(meshard, n) for n in names]
    patch.undo()
    patch.undo()
    assert [getattr(torch_fsdp, name) for name in names] == theirs


def test_patches_may_be_undone_in_any_order():
    theirs = torch_fsdp.fully_shard
    for first, second in ((0, 1), (1, 0)):
        patches = patch_torch(), patch_torch()
        assert torch_fsdp.fully_shard is meshard.fully_shard
        patches[first].undo()
        patches[second].undo()
        assert torch_fsdp.fully_shard is theirs


@pytest.mark.parametrize(
    "path",
    [
        "fsdp",
        "fsdp._fully_shard",
        "fsdp._fully_shard._fully_shard",
        "_composable.fsdp",
        "_composable.fsdp.fully_shard",
    ],
)
def test_every_module_of_torch_that_has_it_gives_ours(path):
    module = importlib.import_module(f"torch.distributed.{path}")
    with patch_torch():
        assert module.fully_shard is meshard.fully_shard
        assert module.register_fsdp_forward_method is meshard.register_fsdp_forward_method


def test_a_module_that_is_imported_inside_the_block_gives_torchs_after_it(monkeypatch):
    package = importlib.import_module("torch.distributed._composable.fsdp")
    monkeypatch.setattr(package, "fully_shard", package.fully_shard)  # importing sets it too
    monkeypatch.delitem(sys.modules, f"{package.__name__}.fully_shard")
    with patch_torch():
        module = importlib.import_module(f"{package.__name__}.fully_shard")
        assert module.fully_shard is meshard.fully_shard
    assert module.fully_shard is torch_fsdp.fully_shard


def test_a_version_of_torch_may_lack_one_of_the_modules(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed._composable.fsdp", None)
    with patch_torch():
        assert torch_fsdp.fully_shard is meshard.fully_shard


@pytest.mark.parametrize("path", ["_composable", "_composable.replicate_with_fsdp"])
def test_both_replicates_of_torch_stay_torchs(path):
    module = importlib.import_module(f"torch.distributed.{path}")
    theirs = module.replicate
    with patch_torch():
        assert module.replicate is theirs


@pytest.mark.parametrize("policy", [None, torch_fsdp.OffloadPolicy, meshard.OffloadPolicy])
@on_fake_ranks(2)
def test_no_offload_policy_and_its_class_are_that_of_torch_without_offload(policy):
    layer = meshard.fully_shard(nn.Linear(4, 4), offload_policy=policy)
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad.device.type == "cpu"


@on_fake_ranks(2)
def test_trainers_read_the_dtypes_of_a_unit():
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    head = meshard.fully_shard(nn.Linear(4, 4), mp_policy=torch_fsdp.MixedPrecisionPolicy(*dtypes))
    assert isinstance(meshard.MixedPrecisionPolicy(), torch_fsdp.MixedPrecisionPolicy)
    for layer in (head, copy.deepcopy(head)):
        found = layer._get_fsdp_state()._mp_policy
        assert (found.param_dtype, found.reduce_dtype, found.output_dtype) == dtypes
        assert found.cast_forward_inputs is True
