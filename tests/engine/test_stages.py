"""What a parameter and its gradient are at each stage, as docs/maintain/architecture.md says."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshard
from meshard import GradientSync
from tests.support.insides import unsharded_bytes
from tests.support.ranks import fake_group, on_fake_ranks


@pytest.fixture
def model():
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        for module in (*net, net):
            meshard.fully_shard(module, mesh)
        yield net


def is_shard(tensor):
    return isinstance(tensor, DTensor) and tensor.placements == (Replicate(), Shard(0))


def test_forward_and_backward_see_unsharded_parameters_and_all_else_shards(model):
    layer, seen = model[0], []
    sharded = layer.weight
    assert is_shard(sharded) and sharded.to_local().shape == (2, 4)
    layer.register_forward_pre_hook(lambda *_: seen.append(layer.weight))
    x = torch.ones(1, 4, requires_grad=True) * 1
    x.register_hook(lambda _: seen.append(layer.weight))  # at the end of the layer's backward
    loss = model(x).sum()
    (unsharded,) = seen
    assert type(unsharded) is nn.Parameter and unsharded.shape == (4, 4)
    assert unsharded_bytes(layer) == 0
    assert layer.weight is sharded
    loss.backward()
    assert seen[1] is unsharded
    assert unsharded_bytes(layer) == 0
    assert layer.weight is sharded
    assert unsharded.grad is None


def test_without_resharding_parameters_stay_unsharded_from_forward_to_backward(model):
    layer = model[0]
    layer.set_reshard_after_forward(False)
    sharded = layer.weight
    loss = model(torch.ones(1, 4)).sum()
    assert type(layer.weight) is nn.Parameter and unsharded_bytes(layer) == 4 * 4 * 4
    loss.backward()
    assert unsharded_bytes(layer) == 0
    assert layer.weight is sharded


@pytest.mark.parametrize(
    ("mode", "pending"),
    [
        (GradientSync.NONE, "unsharded"),
        (GradientSync.REDUCE_SCATTER, "partial"),
        (GradientSync.FULL, ""),
    ],
)
def test_a_gradient_is_where_its_mode_puts_it_until_zero_grad(model, mode, pending):
    model.set_gradient_sync(mode)
    model(torch.ones(1, 4)).sum().backward()
    gradient, found = model[0].weight.grad, meshard.pending_gradients(model)
    assert is_shard(gradient) == (not pending) and bool(found) == bool(pending)
    if pending == "unsharded":
        assert found["0.weight"] is None
    elif pending:
        assert found["0.weight"].to_local().shape == (2, 4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        assert model[0].weight.grad is gradient
        optimizer.zero_grad()
        assert model[0].weight.grad is None


@on_fake_ranks(2)
def test_a_checkpoint_is_refused_while_gradients_of_any_unit_of_a_module_are_pending():
    model = meshard.fully_shard(
        nn.Linear(4, 4),  # the bias becomes a unit of its own, which is replicated
        shard_placement_fn=lambda param: Shard(0) if param.dim() > 1 else Replicate(),
    )
    model.weight.requires_grad_(False)
    with meshard.no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="holds gradients that are"):
        model.state_dict()
    meshard.finalize_gradients(model)
    model.state_dict()
