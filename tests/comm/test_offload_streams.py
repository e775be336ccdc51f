"""Order of reads and writes of host memory while copies are in flight."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from meshard._comm.communicator import DONE
from meshard._comm.host_copies import HostCopies
from meshard._comm.streams import StreamCommunicator
from meshard._params.unit_params import MemoryLocation
from tests.support import insides
from tests.support.fake_device import FakeDevice
from tests.support.ranges import profiled_ranges
from tests.support.ranks import fake_group
from tests.support.spread import spread
from tests.support.stream_steps import MIXED, StreamRun


class FakeHost:
    """Stands in for a ``MemoryLocation`` in pinned host memory."""

    device = torch.device("cpu")
    is_pinned = False  # what a CPU can offer; the fake device takes it to be pinned

    def __init__(self, device):
        self._device = device
        self.num_allocated = 0

    def empty_like(self, tensor):
        with _disable_current_modes():
            made = torch.empty_like(tensor, device=self.device)
        self.num_allocated += 1
        self._device.add_host_memory(made)
        return made

    def buffer_for(self, layout):
        numel, dtype = layout.shard_form
        with _disable_current_modes():
            return self.empty_like(torch.empty(numel, dtype=dtype))


class Run(StreamRun):
    """A model with its shards in what the device takes for pinned memory."""

    def __init__(self, monkeypatch, mesh_shape, **kwargs):
        device = FakeDevice()
        self.host = FakeHost(device)
        monkeypatch.setattr(MemoryLocation, "host_memory", lambda device, *, pin: self.host)
        policy = CPUOffloadPolicy(pin_memory=False)
        super().__init__(monkeypatch, mesh_shape, device, offload_policy=policy, **kwargs)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, *, set_to_none=True):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def edit(self):
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(2)


@pytest.fixture
def run(monkeypatch):
    with fake_group(4):
        yield Run(monkeypatch, (2, 2))


@pytest.fixture
def recorded(run):
    """Record what the test does, which must have no race."""
    with run.recorder:
        yield run
    assert run.device.races == []


@spread(
    mesh=[(4,), (2, 2), (1,), (2, 2)],
    is_mixed=[False, True],
    is_last=[False, False, True, True],
    set_to_none=[True, False, False, True],
)
def test_training_has_no_race(monkeypatch, mesh, is_mixed, is_last, set_to_none):
    with fake_group(torch.Size(mesh).numel()):
        policy = MIXED if is_mixed else MixedPrecisionPolicy()
        run = Run(monkeypatch, mesh, mp_policy=policy)
        with run.recorder:
            for schedule in ("FFF", "NNF", "RNF", "F"):
                run.window(schedule, is_last=is_last)
                run.step(set_to_none=set_to_none)
    assert run.device.races == []
    assert run.recorder.num_checked > 1000
    # Compute, gathers, the stream of the host, the host, and reductions over several ranks.
    assert len(run.recorder.streams_used) >= 4 + (mesh[-1] > 1) + (len(mesh) == 2)


def test_the_host_waits_at_the_end_of_backward_only(monkeypatch, run):
    waits = []
    wait = HostCopies.wait
    lifecycle = insides.units(run.model)[0].lifecycle

    def look(self):
        waits.append(len(lifecycle._queue._queue))
        wait(self)

    with run.recorder:
        run.window("F")
        run.step()
        before = run.device.num_host_waits
        run.recorder.num_blocking = 0  # the ranks have compared what they brought
        monkeypatch.setattr(HostCopies, "wait", look)
        run.window("FRF")
    assert waits == [0] * 4  # one per unit, once, when everything has been queued
    assert run.device.num_host_waits - before <= 8
    assert run.recorder.num_blocking == 0


@pytest.mark.parametrize("is_last", [True, False])
def test_a_reduction_allocates_host_memory_once_per_unit(recorded, is_last):
    for schedule in ("FF", "NRF", "FFF"):
        before = recorded.host.num_allocated
        recorded.window(schedule, is_last=is_last)
        assert recorded.host.num_allocated - before == 4 * schedule.count("F")
        recorded.step()


def test_the_device_keeps_one_gradient_on_its_way_and_none_after(monkeypatch, run):
    held = []
    store = HostCopies.store

    def bytes_on_the_way():
        copies = [unit.group.unit_params.host_copies._writing for unit in insides.units(run.model)]
        return sum(tensor.nbytes for copy in copies if copy is not DONE for tensor in copy._keep)

    def look(self, host, source, comm, **options):
        queued = store(self, host, source, comm, **options)
        held.append((bytes_on_the_way(), source.nbytes))
        return queued

    monkeypatch.setattr(HostCopies, "store", look)
    run.window("F")
    assert len(held) == 4
    # The copy before goes as soon as the next one is queued.
    pairs = zip(held[1:], held, strict=False)
    assert all(now <= mine + before for (now, mine), (_, before) in pairs)
    assert bytes_on_the_way() == 0


def test_shards_may_be_edited_after_evaluations_and_one_that_fails(recorded):
    with torch.no_grad():
        for _ in range(2):
            recorded.forward()
            recorded.edit()
        recorded.model[3].register_forward_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            recorded.forward()
        recorded.edit()


def test_shards_may_be_edited_after_a_reshard_by_hand(recorded):
    recorded.forward()
    for module in (*recorded.model[3:0:-1], recorded.model):
        module.reshard()
    recorded.edit()


def test_an_optimizer_may_step_after_a_forward_that_has_no_backward(recorded):
    recorded.window("F")
    recorded.forward()
    recorded.step()


def test_finalizing_waits_too(recorded):
    recorded.model.set_is_last_backward(False)
    recorded.forward().backward()
    meshard.finalize_gradients(recorded.model)
    with torch.no_grad():
        for param in recorded.model.parameters():
            param.grad.mul_(0.5)
    recorded.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_on_their_way_may_be_cleared(recorded, set_to_none):
    recorded.window("F")
    recorded.model.set_is_last_backward(False)
    for _ in range(2):
        recorded.forward().backward()
    recorded.optimizer.zero_grad(set_to_none=set_to_none)
    recorded.window("FF", is_last=True)
    recorded.step(set_to_none=set_to_none)
    recorded.window("F")
    recorded.step()


def test_a_backward_that_fails_leaves_nothing_on_its_way(recorded):
    recorded.window("F")
    recorded.step()
    handle = recorded.model[1].register_full_backward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        recorded.window("F")
    handle.remove()
    recorded.window("F")
    recorded.step()


def test_a_host_that_does_not_wait_is_found_out(monkeypatch, run):
    monkeypatch.setattr(HostCopies, "wait", lambda self: None)
    with run.recorder:
        run.window("F")
        run.step()
    assert any("on stream -1 is not ordered" in race for race in run.device.races)


def test_a_shard_written_too_early_is_found_out(run):
    with run.recorder:
        run.forward()
        run.edit()
    assert any("write by aten.mul" in race for race in run.device.races)


def test_a_gradient_dropped_too_early_is_found_out(monkeypatch, run):
    queued = StreamCommunicator.record
    monkeypatch.setattr(StreamCommunicator, "record", lambda self, *_, **__: queued(self))
    with run.recorder:
        run.window("FF", is_last=True)
    assert any("reuse of memory" in race for race in run.device.races)


def test_a_copy_that_does_not_wait_for_the_reduction_is_found_out(monkeypatch, run):
    store = HostCopies.store

    def too_early(self, host, source, comm, **options):
        with run.device.stream(run.device.Stream()):
            return store(self, host, source, comm, **options)

    monkeypatch.setattr(HostCopies, "store", too_early)
    with run.recorder:
        run.window("FF", is_last=True)
    assert run.device.races


def test_a_profiler_shows_the_copies_of_each_unit(run):
    run.window("F", is_last=True)
    run.step()
    with profiled_ranges() as names:
        run.window("F", is_last=True)
    copies = Counter(tuple(each.split()) for each in names)
    for unit in ("(root)", "1", "2", "3"):
        assert copies["copy_to_host", unit] == 1
        assert copies["copy_to_device", unit] == (1 if unit == "(root)" else 2)
