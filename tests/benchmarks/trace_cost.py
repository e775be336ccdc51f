"""Host time of a step per unit, while ``meshard.trace`` records it and while it does not.

CPU time of one thread, on a fake process group, in turns. Kernels are tiny, so that this is the
most that a trace adds.
"""

import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.benchmarks.rounds import in_turns, show
from tests.support.ranks import fake_group


def run(units=48, rounds=60, layers=6, world=8, width=16):
    torch.set_num_threads(1)
    with fake_group(world), tempfile.TemporaryDirectory() as folder:
        blocks = [
            nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            for _ in range(units)
        ]
        model = nn.Sequential(*blocks)
        mesh = init_device_mesh("cpu", (world,))
        for module in (*model, model):
            meshard.fully_shard(module, mesh)
        optimizer = meshard.flat_optimizer(model, torch.optim.AdamW, lr=0.0, foreach=True)

        def step(context):
            with context:
                start = time.thread_time()
                model(torch.ones(1, width)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                return time.thread_time() - start

        path = Path(folder) / "trace.json"
        steps = {"off": lambda: step(nullcontext()), "on": lambda: step(meshard.trace(path))}
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
