"""Order of steps in backward with all that reads what they write, and with nothing else."""

import copy
import functools

import pytest
import torch

import meshard
import meshard.optim.overlap
from meshard import MixedPrecisionPolicy, overlap_optimizer
from meshard._comm.communicator import CommStream
from meshard._comm.streams import StreamCommunicator
from tests.support.fake_device import Stream
from tests.support.ranks import fake_group
from tests.support.spread import spread
from tests.support.stream_steps import MIXED, StreamRun

UNIT_NORM = {"max_unit_norm": 1.0, "clip_value": 0.5}
GATHER = {"wait": "gather"}


class Run(StreamRun):
    """A model with an optimizer that steps in backward."""

    def __init__(self, monkeypatch, mesh_shape=(4,), cls=torch.optim.AdamW, options=None, **kwargs):
        super().__init__(monkeypatch, mesh_shape, **kwargs)
        self.optimizer = overlap_optimizer(self.model, cls, lr=0.1, **(options or {}))

    def seen_by(self, stream):
        """Return how much of the optimizer's stream is over for ``stream``."""
        optimizer = self.comm._streams.get(CommStream.OPTIMIZER)
        return 0 if optimizer is None else stream.clock.get(optimizer.number, 0)

    def evaluate(self):
        with torch.no_grad():
            self.forward()


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
    options=[{}, GATHER, UNIT_NORM],
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
                run.evaluate()
    assert run.device.races == []
    assert run.comm._streams[CommStream.OPTIMIZER].number in run.recorder.streams_used


def values_of(optimizer_state):
    return [
        value + 1 for state in optimizer_state.values() for value in state.values() if value.dim()
    ]


def unsharded_values_of(model):
    with meshard.unsharded_params(model):
        return [param + 1 for param in model.parameters()]


WAITING = {  # what waits by itself, also between backward and ``step``
    "state_dict": lambda run: [each + 1 for each in run.model.state_dict().values()],
    "loading": lambda run: run.model.load_state_dict(run.model.state_dict()),
    "full_tensor": lambda run: [p.full_tensor() for p in run.model.parameters()],
    "to_local": lambda run: [p.to_local() + 1 for p in run.model.parameters()],
    "unsharded_params": lambda run: unsharded_values_of(run.model),
    "the state": lambda run: values_of(run.optimizer.state),
    "its state_dict": lambda run: values_of(run.optimizer.state_dict()["state"]),
    "loading the state": lambda run: run.optimizer.load_state_dict(
        copy.deepcopy(run.optimizer.state_dict())
    ),
}
READS = {
    "an operator": lambda run: torch._foreach_norm(list(run.model.parameters())),
    "an edit": lambda run: [p.data.mul_(2.0) for p in run.model.parameters()],
    **WAITING,
}


def check_reads(monkeypatch, options, reads, *, steps, waits=False):
    with fake_group(4):
        run, done = Run(monkeypatch, options=options), []
        with run.recorder:
            for name, read in reads.items():
                run.window()  # whose steps write what was read before
                if steps:
                    run.optimizer.step()
                if waits:
                    run.optimizer.wait()
                with torch.no_grad():
                    read(run)
                done.append(name)
                assert run.device.races == [], done[-2:]


@pytest.mark.parametrize("options", [{}, GATHER], ids=str)
def test_steps_are_over_when_step_or_wait_returns(monkeypatch, options):
    waits = "wait" in options
    check_reads(monkeypatch, options, READS, steps=options is not GATHER, waits=waits)


@pytest.mark.parametrize("options", [{}, GATHER], ids=str)
def test_what_reads_a_parameter_waits_by_itself(monkeypatch, options):
    check_reads(monkeypatch, options, WAITING, steps=False)


def test_nothing_waits_in_backward_and_a_gather_for_its_own_unit_only(monkeypatch, sgd_run):
    run = sgd_run
    steps, gathers, in_backward = {}, {}, []
    step, gather = meshard.optim.overlap.UnitStepper.step, StreamCommunicator.all_gather
    wait = Stream.wait_event

    def log_step(self, *args):
        found = step(self, *args)
        stream = run.comm._streams[CommStream.OPTIMIZER]
        steps[self.group.label] = run.seen_by(stream)
        return found

    def log_gather(self, source, *, label, **where):
        gathers.setdefault(label, run.seen_by(run.device.current_stream()))
        return gather(self, source, label=label, **where)

    def log_wait(self, event):
        if self is not run.comm._streams.get(CommStream.OPTIMIZER) and run.seen_by(event):
            in_backward.append(self.number)
        wait(self, event)

    monkeypatch.setattr(meshard.optim.overlap.UnitStepper, "step", log_step)
    monkeypatch.setattr(StreamCommunicator, "all_gather", log_gather)
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
        run.evaluate()
    # The units are stepped last first; what is gathered has seen its own step, and no later one.
    for label, seen in gathers.items():
        assert seen >= steps[label], label
    last = max(steps, key=steps.get)
    assert gathers[last] <= steps[last]
    assert run.device.races == []


def test_gradients_are_given_back_once_the_step_is_over(run):
    with run.recorder:
        run.window()
        assert all(param.grad is None for param in run.model.parameters())
        held = [tensor for _, tensors in run.comm._held_until_done for tensor in tensors]
        assert len(held) > 0
        run.device.is_through = True
        run.evaluate()
        assert len(run.comm._held_until_done) == 0


@pytest.mark.parametrize(
    ("left_out", "what"), [("enter_after", "read by"), ("hold_until_done", "reuse of memory")]
)
def test_gathers_and_reuse_that_do_not_wait_are_found_out(monkeypatch, sgd_run, left_out, what):
    monkeypatch.setattr(StreamCommunicator, left_out, lambda self, *_: None)
    with sgd_run.recorder:
        sgd_run.window()
        sgd_run.window()
    assert any(what in race for race in sgd_run.device.races)


def test_a_read_that_does_not_wait_is_found_out(monkeypatch):
    with fake_group(4):
        run = Run(monkeypatch, options=GATHER)
        with run.recorder:
            run.window()
            run.optimizer.step()
            READS["an operator"](run)
    assert any("read by" in race for race in run.device.races)
