"""Network time that steps see on any number of ranks, on a pretended network.

    python tests/benchmarks/network.py [--device cuda] [--ranks 8 64 1024] [--rounds 15] [--json]

One rank of a process group that takes as long as the network would (400 GB/s inside a host of 8
ranks, 50 GB/s across, 5 us for each doubling of the ranks), and sends nothing. What is exposed is
the median step less that with a network of no latency and endless bandwidth, beside what all
collectives of the step take together. On the CPU, where compute is slower, so is the network: by
``--slower``. Losses are not compared: what is gathered is garbage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import CommLedger
from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE, Configuration
from tests.support.pretend_network import Network, pretend_group

EVERYBODY = (PEER, OURS, PEER_WHOLE, OURS_WHOLE)
NOTHING = Network(inside=float("inf"), across=float("inf"), latency=0.0)
WARM_UP = 3
CONFIGURATIONS = {
    "cpu": Configuration("width 512, batch 1 x 128", 512, 1),
    "cuda": Configuration("width 4096, batch 8 x 1024, bfloat16", 4096, 8, 1024, narrow=True),
}


def step_seconds(
    steps: dict[str, Callable[[], float]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(WARM_UP + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def measure(
    ranks: int,
    network: Network,
    device: torch.device,
    rounds: int,
    configuration: Configuration | None = None,
) -> dict[str, Any]:
    """Return median seconds per step of everybody, and seconds that a step communicates for."""
    configuration = configuration or CONFIGURATIONS[device.type]
    with pretend_group(ranks, network):
        mesh = init_device_mesh(device.type, (ranks,))
        tokens, following = (each.to(device) for each in configuration.make_batch(0))
        steps, wire = {}, {}
        for name in EVERYBODY:
            model = contenders.make(name, configuration, mesh, device)
            steps[name] = contenders.trainer(model, (tokens, following))
        for name in (OURS, OURS_WHOLE):
            steps[name]()
            with CommLedger() as ledger:
                steps[name]()
            # The peer sends as much: see collectives.py.
            wire[name] = sum(network.seconds(e.payload_bytes, e.group_size) for e in ledger.events)
        times = step_seconds(steps, rounds, device)
        del steps, model
    return {"seconds": times, "wire": {PEER: wire[OURS], PEER_WHOLE: wire[OURS_WHOLE]} | wire}


def run(
    device: str = "cpu", ranks: tuple[int, ...] = (8, 64), rounds: int = 9, slower: float = 200.0
) -> dict[str, Any]:
    """Measure all sizes; return the figures."""
    where, network = torch.device(device), Network()
    if where.type == "cpu":
        network = replace(
            network,
            inside=network.inside / slower,
            across=network.across / slower,
            latency=network.latency * slower,
        )
    title = f"{CONFIGURATIONS[where.type].name}, ms"
    print(f"{title:<44}{'step':>8}{'wire':>8}{'exposed':>9}{'hidden':>8}", file=sys.stderr)
    figures: dict[str, Any] = {}
    for count in ranks:
        # What a rank computes depends on how many there are: its shard is smaller.
        free = measure(count, NOTHING, where, rounds)["seconds"]
        taken = measure(count, network, where, rounds)
        figures[str(count)] = {}
        for name, seconds in taken["seconds"].items():
            wire, exposed = taken["wire"][name], seconds - free[name]
            figures[str(count)][name] = {"step": seconds, "wire": wire, "exposed": exposed}
            print(
                f"  {f'{name}, {count} ranks':<42}{1e3 * seconds:>8.0f}{1e3 * wire:>8.0f}"
                f"{1e3 * exposed:>9.0f}{1 - exposed / wire:>8.0%}",
                file=sys.stderr,
                flush=True,
            )
    return figures


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(CONFIGURATIONS), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slower", type=float, default=200.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: nothing was measured.", file=sys.stderr)
        return
    torch.set_num_threads(1)
    figures = run(args.device, tuple(args.ranks), args.rounds, args.slower)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
