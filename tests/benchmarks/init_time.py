"""Time to shard a model of a thousand units.

    python tests/benchmarks/init_time.py [--units 1000] [--world 4096] [--json]

Process CPU time of ``fully_shard`` on every unit and the root, on a fake process group. The two
take turns; a figure is the median over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import fully_shard
from tests.support.fake import fake_group

TARGET = 1.00


def seconds_to_shard(shard: Any, units: int, world: int) -> float:
    """Return the CPU seconds of sharding ``units`` layers and the module around them."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(units)))
    mesh = init_device_mesh("cpu", (world,))
    gc.collect()
    start = time.process_time()
    for layer in model:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return time.process_time() - start


def run(units: int = 1000, world: int = 4096, rounds: int = 3) -> dict[str, Any]:
    """Measure both; return the figures."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"fully_shard": [], "meshard": []}
    with fake_group(world):
        for _ in range(rounds):
            seconds["fully_shard"].append(seconds_to_shard(torch_fully_shard, units, world))
            seconds["meshard"].append(seconds_to_shard(fully_shard, units, world))
        gc.collect()
    figures = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = figures["meshard"] / figures["fully_shard"]
    print(f"sharding {units} units, world {world}, s of CPU time", file=sys.stderr)
    for name, value in figures.items():
        print(f"  {name:<28}{value:>8.2f}", file=sys.stderr)
    print(f"  {'meshard / fully_shard':<56}{ratio:>6.2f}   target {TARGET:.2f}", file=sys.stderr)
    return {"seconds": figures, "ratio": ratio}


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=1000)
    parser.add_argument("--world", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.units, args.world, args.rounds)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
