"""Host time of sharding per unit and step, where communication is free.

Process CPU time on a fake process group, of one thread. Implementations take turns, step by step,
in one process; a figure is the median over rounds of (sharded - plain) / units, in microseconds.
Losses are not compared here: a fake group leaves garbage in what it gathers.

    python tests/benchmarks/host_time.py [--units 48] [--layers 6] [--world 8] [--json]

The optimizer is AdamW (foreach) on the sharded parameters; for meshard also by flat_optimizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import flat_optimizer, fully_shard
from meshard._comm import cpu
from tests.support.fake import fake_group

FLAT = "meshard, flat"
KINDS = ("plain", "torch", "meshard", FLAT)
PHASES = ("forward", "backward", "optimizer", "zero_grad")
TARGETS = (0.35, 0.35, 0.25)
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
    times.append(time.process_time())
    optimizer.zero_grad()
    times.append(time.process_time())
    return {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}


def samples_of(args: argparse.Namespace) -> dict[str, list[Step]]:
    """Return the CPU seconds of every round of each implementation, by phase."""
    torch.set_num_threads(1)
    with fake_group(args.world):
        runs: dict[str, Callable[[], Step]] = {}
        x = torch.ones(1, args.width)
        for kind in KINDS:
            model = build(kind, args.units, args.layers, args.width)
            optimizer: torch.optim.Optimizer
            if kind == FLAT:
                optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.0, foreach=True)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)
            runs[kind] = lambda m=model, o=optimizer: one_step(m, o, x)  # type: ignore[misc]
        samples: dict[str, list[Step]] = {kind: [] for kind in runs}
        for round_number in range(args.warm_up + args.rounds):
            for kind, run in runs.items():
                step = run()
                if round_number >= args.warm_up:
                    samples[kind].append(step)
        del runs
    return samples


def measure(args: argparse.Namespace) -> dict[str, Step]:
    """Return microseconds per unit, by phase.

    Of forward, backward and zero_grad what is added to the plain model, of the optimizer all.
    """
    samples = samples_of(args)
    plain = samples["plain"]

    def figure(steps: list[Step], phase: str) -> float:
        base = [0.0 if phase == "optimizer" else step[phase] for step in plain]
        added = [mine[phase] - other for mine, other in zip(steps, base, strict=True)]
        return 1e6 / args.units * statistics.median(added)

    return {
        kind: {phase: figure(steps, phase) for phase in PHASES}
        for kind, steps in samples.items()
        if kind != "plain"
    }


def ratios(added: dict[str, Step]) -> dict[str, float]:
    """Return the ratios that have a target."""
    both = {kind: step["forward"] + step["backward"] for kind, step in added.items()}
    flat, ordinary = added[FLAT]["optimizer"], added["meshard"]["optimizer"]
    return {
        "forward + backward, meshard / fully_shard": both["meshard"] / both["torch"],
        "the same, with flat_optimizer": both[FLAT] / both["torch"],
        "AdamW, flat shards / the same DTensors": flat / ordinary,
    }


def report(args: argparse.Namespace, added: dict[str, Step]) -> str:
    """Return a table."""
    lines = [
        f"us of CPU time per unit ({args.layers} parameters, world {args.world})",
        f"{'':<30}{'torch':>10}{'meshard':>10}{'flat':>12}",
    ]
    for phase in PHASES:
        row = "".join(f"{added[kind][phase]:>10.0f}" for kind in KINDS[1:])
        lines.append(f"  {('' if phase == 'optimizer' else 'added in ') + phase:<28}{row}")
    for (name, ratio), target in zip(ratios(added).items(), TARGETS, strict=True):
        lines.append(f"  {name:<56}{ratio:>6.2f}   target {target:.2f}")
    return "\n".join(lines)


def run(layers: tuple[int, ...] = (1, 6, 12, 48), worlds: tuple[int, ...] = (8, 4096)) -> Any:
    """Measure several sizes; return the figures."""
    figures = {}
    for layer_count in layers:
        args = parser(__doc__).parse_args(["--layers", str(layer_count)])
        added = measure(args)
        print(report(args, added), file=sys.stderr, flush=True)
        figures[f"{layer_count} parameters"] = {"added": added, "ratios": ratios(added)}
    growth = growth_with_the_world(worlds[0], worlds[-1])
    name = f"whole step, world {worlds[-1]} / world {worlds[0]}"
    print(f"  {name:<56}{growth:>6.2f}   target 1.10", file=sys.stderr, flush=True)
    return {**figures, "growth with the world": growth}


class Scales(nn.Module):
    """As many vectors as asked for; any world up to their length has the same bytes to move."""

    def __init__(self, count: int, length: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(length) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by one after the other."""
        for scale in self.scales:
            x = x * scale
        return x


def growth_with_the_world(small: int, large: int, turns: int = 6) -> float:
    """Return the ratio of the medians of a step's CPU time; the two worlds take turns."""
    seconds: dict[int, list[float]] = {small: [], large: []}
    for _ in range(turns):
        for world, steps in seconds.items():
            steps.extend(seconds_in_a_world(world))
    return statistics.median(seconds[large]) / statistics.median(seconds[small])


def seconds_in_a_world(world: int, rounds: int = 15) -> list[float]:
    """Return the CPU seconds of whole steps of 48 units; no parameter needs padding.

    Without the gathers of the fake backend, which copies the input to the place of every rank.
    """
    torch.set_num_threads(1)
    length = 4096
    gather = mock.patch.object(cpu, "start_all_gather_on", _pretend)
    with fake_group(world), gather:
        mesh = init_device_mesh("cpu", (world,))
        model = nn.Sequential(*(Scales(6, length) for _ in range(48)))
        for block in model:
            fully_shard(block, mesh)
        fully_shard(model, mesh)
        optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.0, foreach=True)
        steps = [one_step(model, optimizer, torch.ones(1, length)) for _ in range(rounds)]
        del model, optimizer, block
    return [sum(step.values()) for step in steps[5:]]


def _pretend(*_: Any, **__: Any) -> _Over:
    return _Over()


class _Over:
    """A work that is over."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> bool:
        """Return at once."""
        return True


def parser(description: str) -> argparse.ArgumentParser:
    """Return what reads the command line; other benchmarks of host time take the same."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--units", type=int, default=48)
    made.add_argument("--layers", type=int, default=6, help="parameters per unit")
    made.add_argument("--width", type=int, default=16)
    made.add_argument("--world", type=int, default=8)
    made.add_argument("--rounds", type=int, default=25)
    made.add_argument("--warm-up", type=int, default=5)
    made.add_argument("--json", action="store_true")
    return made


def main() -> None:
    """Print a table, or JSON."""
    args = parser(__doc__).parse_args()
    added = measure(args)
    print(json.dumps(added) if args.json else report(args, added))


if __name__ == "__main__":
    main()
