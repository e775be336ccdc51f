"""Are units stepped on a device in order with the copies from host memory and back?"""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
import meshard._engine.build
from meshard import CPUOffloadPolicy, overlap_optimizer
from meshard._comm.communicator import CommStream
from meshard._comm.host_copies import HostCopies
from meshard._comm.streams import StreamCommunicator
from meshard._params.storage import MemoryLocation
from tests.optim.test_overlapped_streams import SYNC
from tests.support.fake import fake_group
from tests.support.fake_device import FakeDevice, FakeHost, Recorder
from tests.support.stream_steps import make_model

SGD = functools.partial(torch.optim.SGD, momentum=0.9)
CPU = torch.device("cpu")


class Run:
    """A model whose shards live in host memory, and are stepped on a recording device."""

    def __init__(self, monkeypatch, mesh_shape=(4,), **options):
        self.device = FakeDevice()
        self.recorder = Recorder(self.device)
        self.comm = StreamCommunicator(self.device)
        self.host = FakeHost(self.device)
        self.host.step_device = CPU  # of the mesh, too: the recording device knows what is host's
        monkeypatch.setattr(meshard._engine.build, "make_communicator", lambda _: self.comm)
        monkeypatch.setattr(MemoryLocation, "host_memory", lambda device, *, pin: self.host)
        mesh = init_device_mesh("cpu", mesh_shape)
        self.model = make_model()
        policy = CPUOffloadPolicy(pin_memory=False)
        for block in self.model[1:4]:
            meshard.fully_shard(block, mesh, offload_policy=policy)
        meshard.fully_shard(self.model, mesh, offload_policy=policy)
        self.optimizer = overlap_optimizer(self.model, SGD, lr=0.1, **options)

    def window(self, schedule="F"):
        for place, letter in enumerate(schedule):
            self.model.set_is_last_backward(place == len(schedule) - 1)
            self.model.set_gradient_sync(SYNC[letter])
            self.model(torch.ones(2, 5)).sum().backward()


@pytest.fixture(params=[(4,), (2, 2), (1,)], ids=str)
def run_on(monkeypatch, request):
    with fake_group(torch.Size(request.param).numel()):
        yield lambda **kwargs: Run(monkeypatch, request.param, **kwargs)


@pytest.fixture
def run(monkeypatch):
    with fake_group(4):
        yield Run(monkeypatch)


def test_training_has_no_race(run_on):
    run = run_on()
    with run.recorder:
        for schedule in ("F", "FFF", "NNF", "RNF", "F"):
            run.window(schedule)
            run.optimizer.step()
            run.optimizer.zero_grad()
        with torch.no_grad():
            run.model(torch.ones(2, 5))
            [param.to_local() + 1 for param in run.model.parameters()]
        run.window()
        for state in run.optimizer.state.values():
            state["momentum_buffer"].to_local() + 1
    assert run.device.races == []
    assert run.comm._streams[CommStream.OPTIMIZER].number in run.recorder.streams_used


def test_the_host_does_not_wait_in_backward(run):
    with run.recorder:
        for _ in range(2):
            run.window()
        loss = run.model(torch.ones(2, 5)).sum()
        before = run.device.num_host_waits
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert run.device.num_host_waits == before
        first = run.model[1][0].weight
        first.to_local()
        assert run.device.num_host_waits == before + 1
    assert run.device.races == []


def test_a_step_that_does_not_wait_for_the_gradient_is_found_out(monkeypatch, run):
    monkeypatch.setattr(HostCopies, "begin_step", lambda self: None)
    with run.recorder:
        for _ in range(2):
            run.window()
    assert any("read by" in race for race in run.device.races)


def test_a_read_that_does_not_wait_is_found_out(monkeypatch, run):
    monkeypatch.setattr(meshard.optim.pending_step, "hide_shards", lambda group: None)
    with run.recorder:
        for _ in range(2):
            run.window()
        [param.to_local() + 1 for param in run.model.parameters()]
    assert any("read by" in race for race in run.device.races)
