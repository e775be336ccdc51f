"""Timing of several implementations in turns, so that their ratios mean something.

They take turns, step by step (A B C A B C ...), in one process group: whatever else the machine
does falls on all of them alike. A figure is a median over rounds, and a ratio is the ratio of two
medians of one run. A step lasts as long as it does on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Body = Callable[[Any], Any]
_PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Times:
    """What the rounds gave for one contender, in milliseconds."""

    median: float
    low: float  # the quarter of the rounds below it
    high: float  # the quarter above

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """Summarise the seconds of all rounds."""
        low, median, high = (1e3 * s for s in statistics.quantiles(seconds, n=4))
        return cls(median, low, high)

    def as_dict(self) -> dict[str, float]:
        """Return it for JSON."""
        return asdict(self)


def interleave(
    steps: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Times], dict[str, float]]:
    """Run the steps in turn; return the times of each, and its last loss.

    **Collective:** all ranks, with the same steps.

    Args:
        steps: By name: runs one step and returns the loss.
        rounds: How often each is timed.
        warm_up: How often each runs before.
        clock: What to time by, in seconds: ``time.process_time`` for CPU time of all threads.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for round_number in range(warm_up + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = clock()
            losses[name] = step()
            if round_number >= warm_up:
                seconds[name].append(clock() - start)
    slowest = torch.tensor(list(seconds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    mean = torch.tensor(list(losses.values()))
    dist.all_reduce(mean, dist.ReduceOp.SUM)
    mean /= dist.get_world_size()
    times = {name: Times.of(slowest[i].tolist()) for i, name in enumerate(steps)}
    return times, dict(zip(steps, mean.tolist(), strict=True))


def on_ranks(body: Body, argument: Any, ranks: int) -> Any:
    """Run ``body(argument)`` on gloo ranks, one thread each; return what rank 0 returned."""
    # A file store: no port to be taken by somebody else.
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (body, argument, ranks, folder), nprocs=ranks)
        return torch.load(Path(folder) / "result", weights_only=False)


def print_figures(
    run: Callable[[int, int, int], Any], page: str, *, rounds: int, warm_up: int
) -> None:
    """Run a benchmark as the command line says: ``run(ranks, rounds, warm_up)`` prints tables."""
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warm-up", type=int, default=warm_up)
    parser.add_argument("--json", action="store_true", help="print the figures too")
    args = parser.parse_args()
    figures = run(args.ranks, args.rounds, args.warm_up)
    if args.json:
        print(json.dumps(figures))


def _run_rank(rank: int, body: Body, argument: Any, ranks: int, folder: str) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_PATIENCE)
    try:
        result = body(argument)
        if rank == 0:
            torch.save(result, Path(folder) / "result")
        dist.barrier()
    finally:
        dist.destroy_process_group()
