"""Setters of FSDP2, on every unit and at any time between steps."""

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync
from tests.support.models import MlpStack
from tests.support.ranks import on_fake_ranks
from tests.support.sharding import shard_blocks


def sharded():
    return shard_blocks(MlpStack(), init_device_mesh("cpu", (2, 2)))


@on_fake_ranks(4)
def test_unshard_and_reshard_by_hand():
    model = sharded()
    block = model.blocks[1]
    handle = block.unshard(async_op=True)
    assert isinstance(block.up.weight, DTensor)
    handle.wait()
    assert block.unshard() is None
    assert type(block.up.weight) is nn.Parameter and block.up.weight.shape == (10, 6)
    for _ in range(2):
        block.reshard()
        assert isinstance(block.up.weight, DTensor)


@pytest.mark.parametrize("reshards", [False, True])
@on_fake_ranks(4)
def test_unshard_lasts_until_a_forward_or_backward_reshards(reshards):
    model = sharded()
    block = model.blocks[0]
    model.set_reshard_after_forward(reshards)
    model.set_reshard_after_backward(False)
    block.unshard()
    unsharded = block.up.weight
    loss = model(torch.ones(1, 6)).sum()
    assert (block.up.weight is unsharded) is not reshards
    loss.backward()
    assert (block.up.weight is unsharded) is not reshards
    assert unsharded.grad is None  # it was reduced
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    assert block.up.weight.grad is not None


@on_fake_ranks(4)
def test_classes_names_and_placements_are_those_of_a_plain_model_and_of_torch():
    model = sharded()
    for cls in (MlpStack, meshard.FSDPModule, torch.distributed.fsdp.FSDPModule):
        assert isinstance(model, cls)
    assert type(model).__name__ == "FSDPMlpStack"
    stack = meshard.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert type(stack[:2]) is nn.Sequential
    names = [name for name, _ in MlpStack().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for param in model.parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert [str(placement) for placement in param.placements] == ["R", "S(0)"]
        assert param.device_mesh.shape == (2, 2)


@on_fake_ranks(4)
def test_units_without_parameters_communicate_nothing():
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    for module in (*model, model):
        meshard.fully_shard(module, mesh)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model.set_modules_to_backward_prefetch([model[0]])
    with CommLedger() as ledger:
        model.set_separate_reduce_scatter_group(True)
        model.unshard()
        for sync in (GradientSync.NONE, GradientSync.FULL):
            model.set_gradient_sync(sync)
            model(torch.ones(2, requires_grad=True)).sum().backward()
        meshard.finalize_gradients(model)
        with meshard.unsharded_params(model):
            model(torch.ones(2))
        meshard.offload(model)
        meshard.onload(model)
        model.reshard()
    assert ledger.events == []
