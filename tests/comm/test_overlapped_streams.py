"""Order of steps in backward with all that reads what they write, and with nothing else."""

import copy
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
import meshard.optim.overlap
from meshard import GradientSync, MixedPrecisionPolicy, overlap_optimizer
from meshard._comm.communicator import CommStream
from meshard._comm.streams import StreamCommunicator
from tests.support import insides
from tests.support.fake import fake_group
from tests.support.fake_device import FakeDevice, Recorder, Stream
from tests.support.spread import spread
from tests.support.stream_steps import MIXED, make_model

SYNC = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}


UNIT_NORM = {"max_unit_norm": 1.0, "clip_value": 0.5}
DEFERRED = {"clip": "deferred", "max_norm": 0.1}
GATHER = {"wait": "gather"}
LATE = {**DEFERRED, **GATHER}


class Run:
    """A model on a recording device, with an optimizer that steps in backward."""

    def __init__(self, monkeypatch, mesh_shape=(4,), cls=torch.optim.AdamW, options=None, **kwargs):
        self.device = FakeDevice()
        self.recorder = Recorder(self.device)
        self.comm = StreamCommunicator(self.device)
        insides.use_communicator(monkeypatch, lambda _: self.comm)
        mesh = init_device_mesh("cpu", mesh_shape)
        self.model = make_model()
        for block in self.model[1:4]:
            meshard.fully_shard(block, mesh, **kwargs)
        meshard.fully_shard(self.model, mesh, **kwargs)
        self.optimizer = overlap_optimizer(self.model, cls, lr=0.1, **(options or {}))

    def window(self, schedule="F"):
        for place, letter in enumerate(schedule):
            self.model.set_is_last_backward(place == len(schedule) - 1)
            self.model.set_gradient_sync(SYNC[letter])
            self.model(torch.ones(2, 5)).sum().backward()

    def on_stream(self, comm_stream):
        return self.comm._streams[comm_stream]

    @property
    def ticks(self):
        """How far the optimizer's lane has got."""
        number = self.on_stream(CommStream.OPTIMIZER).number
        return self.on_stream(CommStream.OPTIMIZER).clock[number]

    def seen_by(self, stream):
        optimizer = self.comm._streams.get(CommStream.OPTIMIZER)
        return 0 if optimizer is None else stream.clock.get(optimizer.number, 0)


@pytest.fixture
def run(monkeypatch):
    with fake_group(4):
        yield Run(monkeypatch)


@pytest.fixture
def sgd_run(monkeypatch):
    """Without counters of steps, which are on the CPU, but that the recording device cannot know:
    to read them would order everything.
    """
    with fake_group(4):
        cls = functools.partial(torch.optim.SGD, momentum=0.9)
        yield Run(monkeypatch, cls=cls, options=GATHER)


@spread(
    options=[{}, GATHER, UNIT_NORM, DEFERRED, LATE],
    mesh=[(4,), (2, 2), (1,)],
    reshard=[None, True, False],
    is_mixed=[False, True],
    cls=[torch.optim.SGD, torch.optim.AdamW],
)
def test_training_has_no_race(monkeypatch, options, mesh, reshard, is_mixed, cls):
    policy = MIXED if is_mixed else MixedPrecisionPolicy()
    kwargs = {"mp_policy": policy, "reshard_after_forward": reshard}
    with fake_group(torch.Size(mesh).numel()):
        run = Run(monkeypatch, mesh, cls, options, **kwargs)
        with run.recorder:
            for schedule in ("F", "FFF", "NNF", "RNF"):
                run.window(schedule)
                run.optimizer.step()
                run.optimizer.zero_grad()
                with torch.no_grad():
                    run.model(torch.ones(2, 5))
    assert run.device.races == []
    assert run.on_stream(CommStream.OPTIMIZER).number in run.recorder.streams_used


READS = {
    "full_tensor": lambda run: [p.full_tensor() for p in run.model.parameters()],
    "to_local": lambda run: [p.to_local() + 1 for p in run.model.parameters()],
    "an operator": lambda run: torch._foreach_norm(list(run.model.parameters())),
    "state_dict": lambda run: [each + 1 for each in run.model.state_dict().values()],
    "an edit": lambda run: [p.data.mul_(2.0) for p in run.model.parameters()],
    "loading": lambda run: run.model.load_state_dict(run.model.state_dict()),
    "unsharded_params": lambda run: _open(run.model),
    "the state": lambda run: [
        value + 1
        for state in run.optimizer.state.values()
        for value in state.values()
        if value.dim()
    ],
    "its state_dict": lambda run: [
        value + 1
        for state in run.optimizer.state_dict()["state"].values()
        for value in state.values()
        if value.dim()
    ],
    "loading the state": lambda run: run.optimizer.load_state_dict(
        copy.deepcopy(run.optimizer.state_dict())
    ),
}


def _open(model):
    with meshard.unsharded_params(model):
        return [param + 1 for param in model.parameters()]


# What waits by itself, also between backward and ``step``.
WAITING = ("state_dict", "loading", "unsharded_params", "the state", "its state_dict")
WAITING += ("loading the state",)


@pytest.mark.parametrize("options", [{}, DEFERRED, GATHER, LATE], ids=str)
def test_steps_are_over_when_step_or_wait_returns(monkeypatch, options):
    for name in READS:
        is_late = "wait" in options
        check_read(monkeypatch, options, name, steps=options is not GATHER, waits=is_late)


@pytest.mark.parametrize("options", [{}, GATHER, LATE], ids=str)
def test_state_dicts_and_gathers_wait_by_themselves(monkeypatch, options):
    for name in WAITING:
        check_read(monkeypatch, options, name, steps=options is LATE)


def check_read(monkeypatch, options, name, *, steps=True, waits=False):
    with fake_group(4):
        run = Run(monkeypatch, options=options)
        with run.recorder, torch.no_grad():
            for is_last in (False, False, True):
                with torch.enable_grad():
                    run.window()
                if not is_last:
                    if steps:
                        run.optimizer.step()
                    if waits:
                        run.optimizer.wait()
                    READS[name](run)
        assert run.device.races == [], name


def test_nothing_waits_in_backward_and_a_gather_for_its_own_unit_only(monkeypatch, sgd_run):
    run = sgd_run
    steps, gathers, in_backward = {}, {}, []
    step, gather = meshard.optim.overlap.UnitStepper.step, StreamCommunicator.gather
    wait = Stream.wait_event

    def log_step(self, *args):
        found = step(self, *args)
        steps[self.group.label] = run.ticks
        return found

    def log_gather(self, source, *, label, **where):
        gathers.setdefault(label, run.seen_by(run.device.current_stream()))
        return gather(self, source, label=label, **where)

    def log_wait(self, event):
        optimizer = run.comm._streams.get(CommStream.OPTIMIZER)
        if optimizer is not None and self is not optimizer and event.clock.get(optimizer.number):
            in_backward.append(self.number)
        wait(self, event)

    monkeypatch.setattr(meshard.optim.overlap.UnitStepper, "step", log_step)
    monkeypatch.setattr(StreamCommunicator, "gather", log_gather)
    monkeypatch.setattr(Stream, "wait_event", log_wait)
    with run.recorder:
        run.window()
        assert len(steps) == 4
        assert in_backward == []  # nor at its end
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert in_backward == []
        assert run.seen_by(run.device.compute) == 0
        gathers.clear()
        with torch.no_grad():
            run.model(torch.ones(2, 5))
    # The units are stepped last first; what is gathered has seen its own step, and no later one.
    order = sorted(steps, key=steps.get)
    for label, seen in gathers.items():
        assert seen >= steps[label], label
    last_gathered = max(gathers, key=lambda label: steps[label])
    assert gathers[order[-1]] <= steps[order[-1]], last_gathered
    assert run.device.races == []


def test_gradients_are_given_back_when_the_step_is_over(run):
    with run.recorder:
        run.window()
        assert all(param.grad is None for param in run.model.parameters())
        held = [tensor for _, tensors in run.comm._held_until_done for tensor in tensors]
        assert len(held) > 0
        run.device.is_through = True
        run.optimizer.step()
        assert len(run.comm._held_until_done) == 0


def test_a_gather_that_does_not_wait_is_found_out(monkeypatch, run):
    monkeypatch.setattr(StreamCommunicator, "enter_after", lambda self, comm_stream, pending: None)
    with run.recorder:
        run.window()
        run.window()
    assert any("read by" in race for race in run.device.races)


def test_gradients_given_back_too_early_are_found_out(monkeypatch, sgd_run):
    run = sgd_run
    monkeypatch.setattr(StreamCommunicator, "hold_until_done", lambda self, tensors: None)
    with run.recorder:
        run.window()
        run.window()
    assert any("reuse of memory" in race for race in run.device.races)


def test_a_read_that_does_not_wait_is_found_out(monkeypatch):
    with fake_group(4):
        run = Run(monkeypatch, options=GATHER)
        with run.recorder, torch.no_grad():
            with torch.enable_grad():
                run.window()
            run.optimizer.step()
            READS["full_tensor"](run)
    assert any("read by" in race for race in run.device.races)
