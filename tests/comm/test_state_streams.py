"""Order of copies and steps of state that rests in host memory, and memory on the device."""

import gc

import pytest
import torch

from meshard import local_optimizer, overlap_optimizer
from meshard._comm.communicator import CommStream
from meshard._params.unit_params import MemoryLocation
from tests.comm.test_offload_streams import FakeHost
from tests.support.fake_device import FakeDevice
from tests.support.ranks import fake_group
from tests.support.spread import spread
from tests.support.stream_steps import StreamRun


class Run(StreamRun):
    """A model whose optimizer keeps its state in what the device takes for pinned memory."""

    def __init__(self, monkeypatch, mesh_shape, cls=torch.optim.SGD, *, overlaps=False, **options):
        device = FakeDevice()
        self.host = FakeHost(device)
        monkeypatch.setattr(MemoryLocation, "host_memory", lambda device, *, pin: self.host)
        super().__init__(monkeypatch, mesh_shape, device)
        options = {"momentum": 0.9} | options if cls is torch.optim.SGD else options
        make = overlap_optimizer if overlaps else local_optimizer
        self.optimizer = make(self.model, cls, lr=0.1, state_device="cpu", **options)

    def step(self):
        self.window()
        self.optimizer.step()
        self.optimizer.zero_grad()


@spread(
    mesh=[(4,), (2, 2), (1,)],
    chunk_bytes=[None, 1, 100],
    cls=[torch.optim.SGD, torch.optim.AdamW],
    over_replicas=[False, True, False],
)
def test_steps_have_no_race(monkeypatch, mesh, chunk_bytes, cls, over_replicas):
    options = {"chunk_bytes": chunk_bytes, "over_replicas": over_replicas and len(mesh) == 2}
    with fake_group(torch.Size(mesh).numel()):
        run = Run(monkeypatch, mesh, cls, **options)
        with run.recorder:
            for _ in range(4):
                run.step()
            values = [each + 1 for own in run.optimizer.state.values() for each in own.values()]
            run.step()
    assert run.device.races == []
    assert values
    used = {run.comm._streams[each].number for each in (CommStream.FETCH, CommStream.HOST)}
    assert used <= run.recorder.streams_used


@spread(
    mesh=[(4,), (2, 2)],
    cls=[torch.optim.SGD, torch.optim.AdamW],
    over_replicas=[False, True],
    wait=["step", "gather"],
)
def test_steps_in_backward_have_no_race(monkeypatch, mesh, cls, over_replicas, wait):
    options = {"wait": wait, "over_replicas": over_replicas and len(mesh) == 2}
    with fake_group(torch.Size(mesh).numel()):
        run = Run(monkeypatch, mesh, cls, overlaps=True, **options)
        with run.recorder:
            for _ in range(4):
                run.step()
            values = [each + 1 for own in run.optimizer.state.values() for each in own.values()]
            run.step()
    assert run.device.races == []
    assert values


def test_the_host_waits_for_nothing_and_the_copies_go_round(monkeypatch):
    with fake_group(4):
        run = Run(monkeypatch, (4,))
        run.step()
        allocated = run.host.num_allocated
        with run.recorder:
            run.window()
            run.device.num_host_waits = 0
            run.recorder.num_blocking = 0
            run.optimizer.step()
        assert run.recorder.num_blocking == 0
        assert run.device.num_host_waits == 1  # for the copies of the step before
        assert run.host.num_allocated == allocated  # the same host memory again


@pytest.mark.parametrize("chunk_bytes", [None, 1])
def test_two_chunks_are_on_the_device(monkeypatch, chunk_bytes):
    with fake_group(1):
        run = Run(monkeypatch, (1,), chunk_bytes=chunk_bytes)
        for _ in range(2):
            run.step()
        made, empty = [], torch.empty

        def seen(*args, **kwargs):
            tensor = empty(*args, **kwargs)
            if tensor.dtype is torch.uint8:
                made.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(torch, "empty", seen)
        run.step()
        gc.collect()
    sizes = [sum(-(-4 * p.numel() // 16) * 16 for p in block.parameters()) for block in run.model]
    if chunk_bytes == 1:  # a parameter for each
        sizes = [-(-4 * p.numel() // 16) * 16 for p in run.model.parameters()]
    else:  # the root's unit has the first and the last block
        sizes = [*sizes[1:4], sizes[0] + sizes[4]]
    assert made == [max(sizes)] * 2
