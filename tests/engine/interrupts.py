"""Interrupts at chosen lines of meshard, and what is left of a training step after each.

Run as ``python -m tests.engine.interrupts KIND FIRST STRIDE`` in a process of its own, which a
wrong answer may end by SIGSEGV. A trace function raises KeyboardInterrupt at a line, once; then the
user does one of the things that one does after Ctrl-C. Every line of meshard that a step runs is
listed once, at its first or at its last occurrence; of that list every STRIDE-th is tried.

Each line that is tried is printed before. What is wrong is printed too, and ends the process by 1.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import GradientSync
from tests.support.models import Made, seeded
from tests.support.parity import full_grads, full_state

KINDS = ("sharded", "hsdp", "host", "kept", "local", "replicated", "bfloat16")
AFTERWARDS = ("state_dict", "step", "next", "evaluation", "reset")
_SOURCES = os.path.dirname(meshard.__file__)
_BATCHES = [torch.arange(6.0).view(2, 3) / 3 - 0.1 * number for number in range(4)]


class Tracer:
    """Calls a function; at one line of meshard that this runs, raises KeyboardInterrupt."""

    def __init__(self, at=-1):
        self._at = at
        self.lines = []  # file, number

    def _enter(self, frame, event, argument):
        return self._follow if frame.f_code.co_filename.startswith(_SOURCES) else None

    def _follow(self, frame, event, argument):
        if event == "line":
            file = os.path.relpath(frame.f_code.co_filename, _SOURCES)
            self.lines.append((file, frame.f_lineno))
            if len(self.lines) == self._at + 1:
                raise KeyboardInterrupt
        return self._follow

    def run(self, function):
        """Return whether an interrupt came out of ``function``."""
        sys.settrace(self._enter)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def make_model():
    """Return two units inside a root with a parameter of its own."""
    return Made(
        lambda m, x: m.second(torch.tanh(m.first(x))) * m.scale,
        first=nn.Linear(3, 3),
        second=nn.Linear(3, 3),
        scale=nn.Parameter(torch.ones(3)),
    )


class Session:
    """A model of one kind on one rank, with its optimizer, and what a step should give."""

    def __init__(self, kind):
        self.kind = kind
        self.model = seeded(make_model())
        options = {
            "host": {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)},
            "kept": {"reshard_after_forward": False},
            "bfloat16": {"mp_policy": meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            "hsdp": {"mesh": init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s"))},
        }.get(kind, {})
        if kind == "replicated":
            meshard.replicate(self.model)
        else:
            for unit in (self.model.first, self.model.second, self.model):
                meshard.fully_shard(unit, **options)
        if kind == "kept":
            self.model.set_reshard_after_backward(False)
        self.optimizer = (
            meshard.local_optimizer(self.model, torch.optim.SGD, lr=0.1)
            if kind == "local"
            else torch.optim.SGD(self.model.parameters(), lr=0.1)
        )
        self.initial = full_state(self.model)
        self.train()
        self.stepped = full_state(self.model)
        self.load(self.initial)
        self.accumulate()
        self.optimizer.step()
        self.optimizer.step()
        self.twice = full_state(self.model)
        self.expected = []  # gradients that the next backward may leave
        for values in (self.initial, self.stepped):
            for num_before in range(3):  # microbatches of the window that was interrupted
                self.optimizer.zero_grad()
                self.load(self.initial)
                self.accumulate(num_before)
                self.load(values)
                self.backward(3, GradientSync.FULL)
                self.expected.append(full_grads(self.model))
        self.optimizer.zero_grad()
        self.load(self.initial)

    def load(self, values):
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                local = param.to_local() if isinstance(param, DTensor) else param
                local.copy_(values[name])

    def backward(self, number, sync):
        self.model.set_gradient_sync(sync)
        self.model(_BATCHES[number]).square().mean().backward()

    def accumulate(self, num_microbatches=2):
        for number, sync in [(1, GradientSync.NONE), (2, GradientSync.FULL)][:num_microbatches]:
            self.backward(number, sync)

    def train(self):
        """Evaluate; run a window of two microbatches; step."""
        with torch.no_grad():
            self.model(_BATCHES[0])
        self.accumulate()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, afterwards):
        """Do what a user may do after an interrupt in ``train``, and yield what is wrong."""
        if afterwards == "reset":
            self.model.reset_iter_state()
        elif afterwards == "state_dict":
            with _refusal("holds gradients that are"):
                state = self.model.state_dict()
                is_sharded = all(isinstance(value, DTensor) for value in state.values())
                if self.kind != "replicated" and not is_sharded:
                    yield "state_dict() holds unsharded tensors"
        elif afterwards == "evaluation":
            with torch.no_grad():
                self.model(_BATCHES[3])
        elif afterwards == "step":
            with _refusal("unit"):
                self.optimizer.step()
                self.model.reset_iter_state()  # modules may hold unsharded parameters, in bfloat16
                if not self._has_values(self.initial, self.stepped, self.twice):
                    yield "the optimizer stepped with a part of the gradients"
            self.optimizer.zero_grad()
            self.load(self.initial)
        if afterwards != "evaluation":
            self.backward(3, GradientSync.FULL)
            if not any(_equal(full_grads(self.model), each) for each in self.expected):
                yield "the gradients of the next backward are wrong"
            if not self._has_values(self.initial, self.stepped):
                yield "the values of the parameters are wrong"
        self.optimizer.zero_grad()
        self.load(self.initial)
        self.train()
        if not self._has_values(self.stepped):
            yield "the next step is wrong"
        self.load(self.initial)

    def _has_values(self, *allowed):
        return any(_equal(full_state(self.model), each) for each in allowed)


def _equal(some, others):
    return all(
        one is other is None or (None not in (one, other) and torch.equal(one, other))
        for one, other in ((some[name], others[name]) for name in others)
    )


@contextlib.contextmanager
def _refusal(text):
    """Accept a RuntimeError with ``text`` in it: a clear answer too."""
    try:
        yield
    except RuntimeError as error:
        if text not in str(error):
            raise


def once_each(lines):
    """Return where each line occurs: the first time, or the last time, by turns."""
    first, last = {}, {}
    for number, line in enumerate(lines):
        first.setdefault(line, number)
        last[line] = number
    return [(first, last)[place % 2][line] for place, line in enumerate(first)]


def main(kind, start, stride):
    """Try lines of ``kind``; return the exit status."""
    session, tracer, num_wrong = Session(kind), Tracer(), 0
    tracer.run(session.train)
    session.load(session.initial)
    chosen = list(enumerate(once_each(tracer.lines)))[start::stride]
    for place, number in chosen:
        afterwards = AFTERWARDS[place % len(AFTERWARDS)]
        file, line = tracer.lines[number]
        where = f"{file}:{line} ({number}), then {afterwards}"
        print(where, flush=True)
        once, wrong = Tracer(number), []
        try:
            # Not inside an ``except``, which would keep the frames of the step alive.
            if not once.run(session.train) and len(once.lines) > number:
                wrong.append("the interrupt was swallowed")
            wrong += session.check(afterwards)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            num_wrong += 1
            print(f"WRONG {where}: {'; '.join(wrong)}", flush=True)
            session = Session(kind)
    print(f"{len(chosen)} lines, {num_wrong} wrong", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    status = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
    sys.exit(status)
