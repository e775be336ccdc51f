"""Time to shard a model of a thousand units: CPU time, on a fake process group."""

import gc
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from meshard import fully_shard
from tests.benchmarks.rounds import in_turns, medians, show, show_ratios
from tests.support.ranks import fake_group


def run(units=1000, world=4096, rounds=3):
    torch.set_num_threads(1)

    def seconds_of(shard):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(units)))
        mesh = init_device_mesh("cpu", (world,))
        gc.collect()
        start = time.process_time()
        for module in (*model, model):
            shard(module, mesh=mesh)
        return time.process_time() - start

    contenders = {"fully_shard": torch_fully_shard, "meshard": fully_shard}
    steps = {name: lambda shard=shard: seconds_of(shard) for name, shard in contenders.items()}
    with fake_group(world):
        _, seconds = in_turns(steps, rounds=rounds)
        gc.collect()
    figures = medians(seconds)
    title = f"sharding {units} units, world {world}, s of CPU time"
    show(title, (), {name: [f"{value:.2f}"] for name, value in figures.items()})
    show_ratios(figures, [("meshard", "fully_shard")])
