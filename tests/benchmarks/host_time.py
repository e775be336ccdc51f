"""What does sharding cost the host, per unit and step, when communication is free?

Process CPU time on a fake process group, of one thread. Implementations take turns, step by step,
in one process; a figure is the median over rounds of (sharded - plain) / units, in microseconds.
Losses are not compared here: a fake group leaves garbage in what it gathers.

    python tests/benchmarks/host_time.py [--units 48] [--layers 6] [--world 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import fully_shard
from tests.support.fake import fake_group

PHASES = ("forward", "backward", "optimizer")
Step = dict[str, float]


class Block(nn.Module):
    """A stack of small layers: as many weights as asked for, no biases."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers one after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def build(kind: str, units: int, layers: int, width: int) -> nn.Module:
    """Return a model of ``units`` blocks: plain, or sharded block by block."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(layers, width) for _ in range(units)))
    if kind == "plain":
        return model
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    shard = torch_fully_shard if kind == "torch" else fully_shard
    for block in model:
        shard(block, mesh=mesh)
    return shard(model, mesh=mesh)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Step:
    """Run a training step; return the CPU seconds of each of its phases."""
    times = [time.process_time()]
    loss = model(x).sum()
    times.append(time.process_time())
    loss.backward()
    times.append(time.process_time())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.process_time())
    return {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}


def measure(args: argparse.Namespace) -> dict[str, Step]:
    """Return the median microseconds that each implementation adds per unit, by phase."""
    torch.set_num_threads(1)
    with fake_group(args.world):
        runs: dict[str, Callable[[], Step]] = {}
        x = torch.ones(1, args.width)
        for kind in ("plain", "torch", "meshard"):
            model = build(kind, args.units, args.layers, args.width)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)
            runs[kind] = lambda m=model, o=optimizer: one_step(m, o, x)  # type: ignore[misc]
        samples: dict[str, list[Step]] = {kind: [] for kind in runs}
        for round_number in range(args.warm_up + args.rounds):
            for kind, run in runs.items():
                step = run()
                if round_number >= args.warm_up:
                    samples[kind].append(step)
        del runs
    plain = samples["plain"]
    return {
        kind: {
            phase: 1e6
            / args.units
            * statistics.median(
                mine[phase] - base[phase] for mine, base in zip(steps, plain, strict=True)
            )
            for phase in PHASES
        }
        for kind, steps in samples.items()
        if kind != "plain"
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--layers", type=int, default=6, help="parameters per unit")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    added = measure(args)
    if args.json:
        print(json.dumps(added))
        return
    print(f"added per unit, us of CPU time ({args.layers} parameters, world {args.world})")
    print(f"{'':<12}{'torch':>10}{'meshard':>10}{'ratio':>8}")
    rows = {phase: (added["torch"][phase], added["meshard"][phase]) for phase in PHASES}
    both = [sum(rows[phase][i] for phase in PHASES[:2]) for i in range(2)]
    for name, (theirs, ours) in {**rows, "fwd + bwd": (both[0], both[1])}.items():
        print(f"{name:<12}{theirs:>10.0f}{ours:>10.0f}{ours / theirs:>8.2f}")


if __name__ == "__main__":
    main()
