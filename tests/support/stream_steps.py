"""Training steps on a fake device, which checks the order of streams."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import MixedPrecisionPolicy
from meshard._comm.streams import StreamCommunicator
from tests.support import insides
from tests.support.fake import fake_group
from tests.support.fake_device import FakeDevice, Recorder
from tests.support.strategies import MODES

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_model():
    blocks = [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 1))


def run_steps(monkeypatch, mesh_shape, device=None, prepare=None, is_last=True, **kwargs):
    """Train three windows of three microbatches; return the device with what it found."""
    device = device or FakeDevice()
    insides.use_communicator(monkeypatch, lambda _: StreamCommunicator(device))
    world_size = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    with fake_group(world_size):
        mesh = init_device_mesh("cpu", mesh_shape)
        model = make_model()
        if prepare is not None:
            prepare(model)
        for block in model[1:4]:
            meshard.fully_shard(block, mesh, **kwargs)
        meshard.fully_shard(model, mesh, **kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(device) as recorder:
            for schedule in ("FFF", "NNF", "RNF"):
                for number, sync in enumerate(schedule):
                    model.set_is_last_backward(is_last or number == len(schedule) - 1)
                    model.set_gradient_sync(MODES[sync])
                    model(torch.ones(2, 5)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return device, recorder
