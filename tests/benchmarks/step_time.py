"""Time of a training step, against others that train the same model.

Forward, backward and AdamW of a GPT of 8 blocks, on gloo ranks of one thread each. The lower bound
is the same model without any communication. Ours runs as its pages recommend: ranks of one host
share memory, and the optimizer is ``local_optimizer``; further rows show it through sockets, and
with torch's optimizer on the DTensors. A run in which losses differ is void.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.benchmarks import contenders
from tests.benchmarks.contenders import (
    COMPUTE,
    DDP,
    NARROW,
    OURS,
    OURS_WHOLE,
    PEER,
    PEER_WHOLE,
    PLAIN,
    REPLICATED,
    REPLICATED_SENT,
    SENT,
    SENT_WHOLE,
    WIDTH_256,
    WIDTH_512,
    Configuration,
)
from tests.benchmarks.rounds import in_turns, on_ranks, show, show_ratios, slowest

RESHARDING, WHOLE = (OURS, PLAIN, SENT), (OURS_WHOLE, SENT_WHOLE)
REPLICAS = (REPLICATED, REPLICATED_SENT)
EVERYBODY = (COMPUTE, DDP, *REPLICAS, PEER, *RESHARDING, PEER_WHOLE, *WHOLE)
PAIRS = (
    *((ours, PEER) for ours in RESHARDING),
    *((ours, PEER_WHOLE) for ours in WHOLE),
    *((ours, DDP) for ours in (*WHOLE, *REPLICAS)),
)


class Task(NamedTuple):
    """What the ranks are to do."""

    configuration: Configuration
    rounds: int
    warm_up: int
    everybody: tuple[str, ...] = EVERYBODY
    clock: Callable[[], float] = time.perf_counter
    device: str = "cpu"


def measure(task):
    """Return the quartiles of everybody's milliseconds, low, median and high. All ranks call it."""
    configuration, device = task.configuration, torch.device(task.device)
    mesh = init_device_mesh(task.device, (dist.get_world_size(),))
    batch, steps = configuration.make_batch(dist.get_rank(), device), {}
    for name in task.everybody:
        # DDP has no bfloat16 compute with float32 gradients in its public interface.
        if not (configuration.narrow and name in (DDP, *REPLICAS)):
            model = contenders.make(name, configuration, mesh, device)
            optimizer = contenders.make_optimizer(model, name)
            steps[name] = contenders.trainer(model, batch, optimizer)
    how = {"rounds": task.rounds, "warm_up": task.warm_up, "clock": task.clock}
    seconds, losses = in_turns(steps, **how, before=dist.barrier)
    last = torch.tensor([each[-1] for each in losses.values()])
    dist.all_reduce(last)
    last = dict(zip(losses, (last / dist.get_world_size()).tolist(), strict=True))
    # Rounding of another order of summation, over all steps.
    tolerance = (2e-2 if configuration.narrow else 1e-4) * last[PEER]
    for name, loss in last.items():
        if name != COMPUTE and abs(loss - last[PEER]) > tolerance:
            raise RuntimeError(f"losses differ, so no time counts: {last}")
    return {
        name: [1e3 * each for each in statistics.quantiles(times, n=4)]
        for name, times in slowest(seconds).items()
    }


def report(title, quartiles, pairs):
    """Print the times and the ratios of their medians; return the times."""
    floor = quartiles[COMPUTE][1]
    rows = {
        name: (f"{median:.0f}", f"{low:.0f} to {high:.0f}", f"{median / floor:.2f}")
        for name, (low, median, high) in quartiles.items()
    }
    show(title, ("ms", "quartiles", "of compute"), rows)
    show_ratios({name: median for name, (_, median, _) in quartiles.items()}, pairs)
    return quartiles


def run(ranks=2, rounds=15, warm_up=3):
    return {
        each.name: report(each.name, on_ranks(measure, Task(each, rounds, warm_up), ranks), PAIRS)
        for each in (WIDTH_256, WIDTH_512, NARROW)
    }
