"""Through which files does a call go: the last gradient of a unit, and fully_shard of a unit?

Counts the files of the library, the calls, and how often the walk goes from one file to another.
The walk of a gradient begins at the hook of the unit's last one and ends when ``.grad`` is set. The
two ranks are threads.
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.benchmarks.rounds import show
from tests.support.threads import run_threads

HOME = Path(meshard.__file__).parent


class Tracer:
    """Records the files of the library's functions that are called while it is installed."""

    def __init__(self, until=""):
        self._until = until  # the function whose return ends the walk
        self.calls = []

    def __enter__(self):
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _record(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if HOME not in path.parents:
            return
        if event == "call":
            self.calls.append(str(path.relative_to(HOME)))
        elif event == "return" and frame.f_code.co_name == self._until:
            sys.setprofile(None)


def fully_shard_of_a_unit():
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(8, 8)
    with Tracer() as tracer:
        meshard.fully_shard(model, mesh)
    return tracer.calls


def last_gradient_to_grad():
    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (2,)), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    for module in (model[0], model):
        meshard.fully_shard(module, mesh)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
    loss, tracer, missing = model(torch.ones(2, 8)).sum(), Tracer(until="publish"), [None] * 2

    def begin_at_the_last(_):
        missing.pop()
        if not missing:
            tracer.__enter__()

    for param in vars(model[0])["_meshard_unit"].params:
        param.unsharded.register_hook(begin_at_the_last)
    loss.backward()
    tracer.__exit__()
    return tracer.calls


def run():
    rows = {}
    for walk in (fully_shard_of_a_unit, last_gradient_to_grad):
        calls, others = run_threads(walk, 2)  # either may do what is done once in a process
        name, files = walk.__name__.replace("_", " "), list(dict.fromkeys(calls + others))
        changes = sum(a != b for a, b in pairwise(calls))
        rows[name] = (str(len(files)), str(len(calls)), str(changes))
        print(f"{name}: {', '.join(files)}")
    show("walks", ("files", "calls", "changes"), rows)
