"""Use ``run_steps`` to train on a fake device, which checks the order of streams."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import MixedPrecisionPolicy
from meshard._comm.streams import StreamCommunicator
from tests.support import insides
from tests.support.fake_device import FakeDevice, Recorder
from tests.support.ranks import fake_group
from tests.support.strategies import MODES

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_model():
    blocks = [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 1))


class StreamRun:
    """A sharded model on a fake device, one unit for each of its three blocks, and the root.

    Args:
        monkeypatch: Makes roots use the device.
        mesh_shape: Of all ranks.
        device: A new one by default.
        prepare: Called with the model before it is sharded.
        **kwargs: For every call of ``fully_shard``.
    """

    def __init__(self, monkeypatch, mesh_shape=(4,), device=None, prepare=None, **kwargs):
        self.device = device or FakeDevice()
        self.recorder = Recorder(self.device)
        self.comm = StreamCommunicator(self.device)
        insides.use_communicator(monkeypatch, lambda _: self.comm)
        mesh = init_device_mesh("cpu", mesh_shape)
        self.model = make_model()
        if prepare is not None:
            prepare(self.model)
        for block in self.model[1:4]:
            meshard.fully_shard(block, mesh, **kwargs)
        meshard.fully_shard(self.model, mesh, **kwargs)

    def forward(self):
        return self.model(torch.ones(2, 5)).sum()

    def window(self, schedule="F", *, is_last=False):
        """Run a microbatch in the mode of each letter, of which the last has the last backward.

        If ``is_last``, each of them has.
        """
        for place, letter in enumerate(schedule):
            self.model.set_is_last_backward(is_last or place == len(schedule) - 1)
            self.model.set_gradient_sync(MODES[letter])
            self.forward().backward()


def run_steps(monkeypatch, mesh_shape, device=None, prepare=None, is_last=True, **kwargs):
    """Train three windows of three microbatches; return the device with what it found."""
    with fake_group(torch.Size(mesh_shape).numel()):
        run = StreamRun(monkeypatch, mesh_shape, device, prepare, **kwargs)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        with run.recorder:
            for schedule in ("FFF", "NNF", "RNF"):
                run.window(schedule, is_last=is_last)
                optimizer.step()
                optimizer.zero_grad()
    return run.device, run.recorder
