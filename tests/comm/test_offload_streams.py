"""Order of reads and writes of host memory while copies are in flight."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CPUOffloadPolicy, GradientSync, MixedPrecisionPolicy
from meshard._comm.communicator import DONE
from meshard._comm.host_copies import HostCopies
from meshard._comm.streams import StreamCommunicator
from meshard._params.storage import MemoryLocation
from tests.support import insides
from tests.support.fake import fake_group
from tests.support.fake_device import FakeDevice, FakeHost, Recorder
from tests.support.spread import spread
from tests.support.stream_steps import MIXED, make_model

SYNC = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}
CHECK = CPUOffloadPolicy(pin_memory=False)


class Run:
    """A model on a fake device, with its shards in what the device takes for pinned memory."""

    def __init__(self, monkeypatch, mesh_shape=(4,), **kwargs):
        self.device = FakeDevice()
        self.host = FakeHost(self.device)
        self.recorder = Recorder(self.device)
        insides.use_communicator(monkeypatch, lambda _: StreamCommunicator(self.device))
        monkeypatch.setattr(MemoryLocation, "host_memory", lambda device, *, pin: self.host)
        mesh = init_device_mesh("cpu", mesh_shape)
        self.model = make_model()
        for block in self.model[1:4]:
            meshard.fully_shard(block, mesh, offload_policy=CHECK, **kwargs)
        meshard.fully_shard(self.model, mesh, offload_policy=CHECK, **kwargs)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def window(self, schedule, *, is_last=True):
        for place, mode in enumerate(schedule):
            self.model.set_is_last_backward(is_last or place == len(schedule) - 1)
            self.model.set_gradient_sync(SYNC[mode])
            self.model(torch.ones(2, 5)).sum().backward()

    def step(self, *, set_to_none=True):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)


@pytest.fixture
def run(monkeypatch):
    with fake_group(4):
        yield Run(monkeypatch, (2, 2))


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
        run.window("FRF", is_last=False)
    assert waits == [0] * 4  # one per unit, once, when everything has been queued
    assert run.device.num_host_waits - before <= 8
    assert run.recorder.num_blocking == 0


@spread(is_last=[True, False], schedules=[("FF", "NRF", "FFF")])
def test_a_window_allocates_host_memory_once_per_unit(run, schedules, is_last):
    with run.recorder:
        for schedule in schedules:
            before = run.host.num_allocated
            run.window(schedule, is_last=is_last)
            assert run.host.num_allocated - before == 4
            run.step()
    assert run.device.races == []


def scratch(run):
    """Return the bytes that the device holds for gradients that are on their way to the host."""
    return sum(
        tensor.nbytes
        for unit in insides.units(run.model)
        for copy in [unit.gradients.sharded._host_copies._writing]
        if copy is not DONE
        for tensor in copy._keep
    )


def test_the_device_keeps_one_gradient_on_its_way_and_none_after(monkeypatch, run):
    held = []
    store = HostCopies.store

    def look(self, host, source, comm, **options):
        queued = store(self, host, source, comm, **options)
        held.append((scratch(run), source.nbytes))
        return queued

    monkeypatch.setattr(HostCopies, "store", look)
    run.window("F")
    assert len(held) == 4
    # The copy before goes as soon as the next one is queued.
    pairs = zip(held[1:], held, strict=False)
    assert all(now <= mine + before for (now, mine), (_, before) in pairs)
    assert scratch(run) == 0


def test_a_gradient_is_added_on_the_host_after_one_from_another_stream():
    """Those of a root and of a later one around it, which has streams of its own."""
    device = FakeDevice()
    recorder, copies = Recorder(device), HostCopies(torch.device("cpu"))
    with recorder:
        host = FakeHost(device).empty_like(torch.ones(4))
        for add in (False, True):
            with device.stream(device.Stream()):  # compute, which waits for no earlier store
                gradient = torch.ones(4)
                copies.store(host, gradient, StreamCommunicator(device), add=add)
        copies.wait()
        assert host.tolist() == [2.0] * 4
    assert device.races == [] and recorder.num_checked > 0


def edit(run):
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(2)


def test_shards_may_be_edited_after_evaluations_and_one_that_fails(run):
    with run.recorder, torch.no_grad():
        for _ in range(2):
            run.model(torch.ones(2, 5))
            edit(run)
        run.model[3].register_forward_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run.model(torch.ones(2, 5))
        edit(run)
    assert run.device.races == []


def test_shards_may_be_edited_after_a_reshard_by_hand(run):
    with run.recorder:
        run.model(torch.ones(2, 5)).sum()
        for module in run.model[:0:-1]:
            if isinstance(module, meshard.FSDPModule):
                module.reshard()
        run.model.reshard()
        edit(run)
    assert run.device.races == []


def test_an_optimizer_may_step_after_a_forward_that_has_no_backward(run):
    with run.recorder:
        run.window("F")
        run.model(torch.ones(2, 5)).sum()
        run.step()
    assert run.device.races == []


def test_finalizing_waits_too(run):
    with run.recorder:
        run.model.set_is_last_backward(False)
        run.model(torch.ones(2, 5)).sum().backward()
        meshard.finalize_gradients(run.model)
        with torch.no_grad():
            for param in run.model.parameters():
                param.grad.mul_(0.5)
        run.step()
    assert run.device.races == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_on_their_way_may_be_cleared(run, set_to_none):
    with run.recorder:
        run.window("F")
        run.model.set_is_last_backward(False)
        for _ in range(2):
            run.model(torch.ones(2, 5)).sum().backward()
        run.optimizer.zero_grad(set_to_none=set_to_none)
        run.window("FF")
        run.step(set_to_none=set_to_none)
        run.window("F")
        run.step()
    assert run.device.races == []


def test_a_backward_that_fails_leaves_nothing_on_its_way(run):
    def fail(_):
        raise ValueError("on purpose")

    with run.recorder:
        run.window("F")
        run.step()
        hidden = run.model[1].register_full_backward_hook(lambda *_: fail(_))
        with pytest.raises(ValueError, match="on purpose"):
            run.window("F")
        hidden.remove()
        run.window("F")
        run.step()
    assert run.device.races == []


def test_a_host_that_does_not_wait_is_found_out(monkeypatch, run):
    monkeypatch.setattr(HostCopies, "wait", lambda self: None)
    with run.recorder:
        run.window("F")
        run.step()
    assert any("on stream -1 is not ordered" in race for race in run.device.races)


def test_a_shard_written_too_early_is_found_out(monkeypatch, run):
    with run.recorder:
        run.model(torch.ones(2, 5)).sum()
        edit(run)
    assert any("write by aten.mul" in race for race in run.device.races)


def test_a_gradient_dropped_too_early_is_found_out(monkeypatch, run):
    queued = StreamCommunicator.record
    monkeypatch.setattr(StreamCommunicator, "record", lambda self, *keep: queued(self))
    with run.recorder:
        run.window("FF")
    assert any("reuse of memory" in race for race in run.device.races)


def test_a_copy_that_does_not_wait_for_the_reduction_is_found_out(monkeypatch, run):
    store = HostCopies.store

    def too_early(self, host, source, comm, **options):
        compute, fresh = run.device.compute, run.device.Stream()
        run.device._current.stream = fresh
        try:
            return store(self, host, source, comm, **options)
        finally:
            run.device._current.stream = compute

    monkeypatch.setattr(HostCopies, "store", too_early)
    with run.recorder:
        run.window("FF")
    assert run.device.races
