"""Host time of a step per unit, while ``meshard.trace`` records it and while it does not.

CPU time of one thread, on a fake process group, in turns. Kernels are tiny, so that this is the
most that a trace adds.
"""

import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

import meshard
from tests.benchmarks.host_time import blocks_of, stepper
from tests.benchmarks.rounds import in_turns, show
from tests.support.ranks import fake_group


def run(units=48, rounds=60, layers=6, world=8, width=16):
    torch.set_num_threads(1)
    with fake_group(world), tempfile.TemporaryDirectory() as folder:
        step = stepper("local", blocks_of(units, layers, width), torch.ones(1, width))

        def seconds(context):
            with context:
                return sum(step().values())

        path = Path(folder) / "trace.json"
        steps = {"off": lambda: seconds(nullcontext()), "on": lambda: seconds(meshard.trace(path))}
        _, found = in_turns(steps, rounds=rounds, warm_up=5)
        content = path.stat().st_size
    off, on = (1e6 / units * statistics.median(found[name]) for name in steps)
    added = statistics.median(b - a for a, b in zip(found["off"], found["on"], strict=True))
    rows = {
        "a step without a trace": [f"{off:.0f}"],
        "a step that is traced": [f"{on:.0f}"],
        "difference": [f"{1e6 / units * added:.0f}"],
    }
    show("us of CPU time per unit", (), rows)
    show("bytes of the file per unit and step", (), {"": [f"{content / units:.0f}"]})
