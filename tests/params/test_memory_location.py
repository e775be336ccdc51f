"""DTensors whose shard is elsewhere than their mesh, or moves."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from meshard import clipping, grad_scaler
from meshard._params.unit_params import MemoryLocation
from meshard._torch.dtensor import local_of, make_dtensor, move_local, place_like
from tests.support.ranks import fake_group

SHAPE = torch.Size([8, 3])


@pytest.fixture
def cuda_mesh():
    """A mesh of a device that need not be there: nothing is allocated on it."""
    with fake_group(4):
        yield init_device_mesh("cuda", (4,))


def test_a_shard_on_the_host_stays_there(cuda_mesh):
    local = torch.ones(2, 3)
    tensor = make_dtensor(local, cuda_mesh, (Shard(0),), SHAPE)
    assert local_of(tensor) is local
    assert tensor.device.type == "cpu" and tensor.shape == SHAPE


def test_a_parameter_is_moved_between_devices_in_place(cuda_mesh):
    with FakeTensorMode():
        away = torch.empty(2, 3, device="cuda")
    host = torch.ones(2, 3)
    param = torch.nn.Parameter(make_dtensor(away, cuda_mesh, (Shard(0),), SHAPE))
    gradient = param.grad = place_like(param, away)
    param.register_post_accumulate_grad_hook(lambda _: None)
    hooks, version, seen = param._post_accumulate_grad_hooks, param._version, param.__dict__
    assert param.device.type == "cuda"
    for target in (host, away, host):
        move_local(param, target)
        move_local(gradient, target)
        assert local_of(param) is target
        assert param.device.type == gradient.device.type == target.device.type
    assert param.grad is gradient and param.is_leaf and param.requires_grad
    assert param._post_accumulate_grad_hooks is hooks and param.__dict__ is seen
    assert param._version == version
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad = place_like(param, torch.full((2, 3), 3.0))
    optimizer.step()
    assert torch.equal(host, torch.full((2, 3), -2.0))


def test_the_norm_of_host_shards_is_gathered_on_the_device(cuda_mesh, monkeypatch):
    meta, seen = torch.device("meta"), []

    def gather_from_all(value, group, label):
        seen.append(value.device)
        return value.new_empty((group.size(), *value.shape))

    monkeypatch.setattr(clipping, "device_of", lambda mesh: meta)  # in the place of a GPU
    monkeypatch.setattr(clipping, "gather_from_all", gather_from_all)
    tensor = make_dtensor(torch.ones(2, 3), cuda_mesh, (Shard(0),), SHAPE)
    assert clipping.get_total_norm([tensor]).device == meta
    assert seen == [meta]


def test_infs_are_agreed_on_where_the_group_works(cuda_mesh, monkeypatch):
    meta, seen = torch.device("meta"), []
    monkeypatch.setattr(grad_scaler, "device_of", lambda mesh: meta)
    monkeypatch.setattr(grad_scaler, "agree_on_max", lambda value, group: seen.append(value.device))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # nothing to copy on meta
    param = make_dtensor(torch.ones(2, 3), cuda_mesh, (Shard(0),), SHAPE)
    optimizer = torch.optim.SGD([torch.nn.Parameter(param)], lr=1.0)
    grad_scaler.ShardedGradScaler("cpu")._unscale_grads_(
        optimizer, torch.ones(()), torch.zeros(()), allow_fp16=False
    )
    assert seen == [meta]


def test_only_memory_beside_a_device_is_pinned():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert MemoryLocation.host_memory(cuda, pin=True) == MemoryLocation(cpu, is_pinned=True)
    assert (
        MemoryLocation.host_memory(cuda, pin=False)
        == MemoryLocation.host_memory(cpu, pin=True)
        == MemoryLocation(cpu)
    )
