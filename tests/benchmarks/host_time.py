"""Host time of sharding per unit and step, where communication is free.

CPU time of one thread, on a fake process group. A figure is the median over rounds of
(sharded - plain) / units; of the optimizer, AdamW (foreach), all of its time counts. *local* is
meshard with ``local_optimizer``, and *fused* that with AdamW's fused kernel. Losses are not
compared: a fake group leaves garbage in what it gathers.
"""

import functools
import statistics
import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshard import fully_shard, local_optimizer, replicate
from meshard._comm import cpu
from tests.benchmarks.rounds import in_turns, medians, show
from tests.support.models import Made
from tests.support.ranks import fake_group

KINDS = ("plain", "torch", "meshard", "local", "fused")
PHASES = ("forward", "backward", "optimizer", "zero_grad")


def blocks_of(units, layers, width):
    return [
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for _ in range(units)
    ]


def stepper(kind, blocks, x):
    """Return what runs a step and returns the CPU seconds of its phases."""
    model = nn.Sequential(*blocks)
    if kind != "plain":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in (*model, model):
            (torch_fully_shard if kind == "torch" else fully_shard)(module, mesh=mesh)
    adamw = {"lr": 0.0, "foreach": True}
    if kind == "local":
        optimizer = local_optimizer(model, torch.optim.AdamW, **adamw)
    elif kind == "fused":
        optimizer = local_optimizer(model, torch.optim.AdamW, lr=0.0, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **adamw)

    def step():
        times = [time.process_time()]
        loss = model(x).sum()
        for phase in (lambda: None, loss.backward, optimizer.step, optimizer.zero_grad):
            phase()
            times.append(time.process_time())
        return {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}

    return step


def show_added(num_units, layers, rounds, world=8, width=16):
    """Print microseconds per unit, by contender and phase, and the ratios that the pages have."""
    with fake_group(world):
        steps = {}
        for kind in KINDS:
            torch.manual_seed(0)
            blocks = blocks_of(num_units, layers, width)
            steps[kind] = stepper(kind, blocks, torch.ones(1, width))
        _, found = in_turns(steps, rounds=rounds, warm_up=5)
        del steps, blocks

    def added(kind, phase):
        base = 0.0 if phase == "optimizer" else 1.0
        pairs = zip(found[kind], found["plain"], strict=True)
        return 1e6 / num_units * statistics.median(a[phase] - base * b[phase] for a, b in pairs)

    figures = {kind: {phase: added(kind, phase) for phase in PHASES} for kind in KINDS[1:]}
    rows = {
        ("" if phase == "optimizer" else "added in ") + phase: [
            f"{each[phase]:.0f}" for each in figures.values()
        ]
        for phase in PHASES
    }
    show(f"us of CPU time per unit ({layers} parameters, world {world})", KINDS[1:], rows)
    both = {kind: each["forward"] + each["backward"] for kind, each in figures.items()}
    optimizer = {kind: each["optimizer"] for kind, each in figures.items()}
    ratios = {
        "forward + backward, meshard / torch": both["meshard"] / both["torch"],
        "the same, with local_optimizer": both["local"] / both["torch"],
        "AdamW, local_optimizer / the same DTensors": optimizer["local"] / optimizer["meshard"],
        "the same, fused / foreach": optimizer["fused"] / optimizer["meshard"],
    }
    show("ratios", (), {name: [f"{ratio:.2f}"] for name, ratio in ratios.items()})


def seconds_in_a_world(world):
    """Return the CPU seconds of whole steps of 48 units; no parameter needs padding.

    Without the gathers of the fake backend, which copies the input to the place of every rank.
    """
    over, length = SimpleNamespace(is_completed=lambda: True, wait=lambda: True), 4096

    def pretend(*_, **__):
        return over

    def multiply(scales, x):
        for scale in scales.parameters():
            x = x * scale
        return x

    def scales():  # any world up to their length has the same bytes to move
        return Made(multiply, each=nn.ParameterList(torch.ones(length) for _ in range(6)))

    with fake_group(world), mock.patch.object(cpu, "start_all_gather_on", pretend):
        step = stepper("local", [scales() for _ in range(48)], torch.ones(1, length))
        seconds = [sum(step().values()) for _ in range(15)]
        del step
    return seconds[5:]


def show_replicated(layers, rounds, width=32, cap=0.0155):
    """Print what replicating adds to the step of a plain model, in buckets of three layers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    views = {"bucket_cap_mb": cap, "gradient_as_bucket_view": True}
    wraps = {
        "plain": lambda model: model,
        "DDP": functools.partial(DistributedDataParallel, static_graph=True, **views),
        "replicate": functools.partial(replicate, **views),
    }
    x = torch.ones(2, width)

    def step(model):
        model(x).sum().backward()
        model.zero_grad()

    steps = {}
    for kind, wrap in wraps.items():
        model = wrap(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
        steps[kind] = functools.partial(step, model)
    seconds, _ = in_turns(steps, rounds=8 * rounds, warm_up=5, clock=time.process_time)
    del steps, model
    dist.destroy_process_group()
    plain, *others = medians(seconds, 1e3).values()
    ddp, ours = (each - plain for each in others)
    cells = [f"{ddp:.2f}", f"{ours:.2f}", f"{ours / ddp:.2f}"]
    title = f"ms of CPU time per step, added by replicating {2 * layers} parameters"
    show(title, ("DDP", "replicate", "ratio"), {"one rank": cells})


def run(units=48, rounds=25, turns=6):
    torch.set_num_threads(1)
    for layers in (1, 6, 12, 48):
        show_added(units, layers, rounds)
    show_replicated(50, rounds)
    by_world = {8: [], 4096: []}
    for _ in range(turns):
        for each, seconds in by_world.items():
            seconds += seconds_in_a_world(each)
    growth = statistics.median(by_world[4096]) / statistics.median(by_world[8])
    show("ratios", (), {"whole step, world 4096 / world 8": [f"{growth:.2f}"]})
