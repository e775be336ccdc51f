"""How long does a save last, a load, and a step that a save in the background interrupts?

    python tests/benchmarks/checkpoint_time.py [--millions 200] [--rounds 7] [--json]

Two ranks save and load a sharded model with the state of AdamW, in turns with
``torch.distributed.checkpoint``. Both sync their files. Times are of the slowest rank. The values
that were loaded are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import meshard
from meshard import CommLedger
from meshard.checkpoint import Checkpointer
from tests.benchmarks.rounds import on_ranks

WIDTH = 1024


def built(millions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model of so many million parameters, and AdamW that has stepped."""
    depth = max(1, round(millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    for layer in model:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _in_turns(
    steps: dict[str, Callable[[], None]], rounds: int, then: Callable[[], None]
) -> dict[str, float]:
    """Return the median milliseconds of each, on the slowest rank; ``then`` is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
            then()
    slowest = torch.tensor(list(seconds.values()))[:, 1:]  # the first is to warm up
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(steps, (slowest.median(dim=1).values * 1e3).tolist(), strict=True))


def measure(given: tuple[str, int, int]) -> dict[str, Any]:
    """Run on each rank; return the figures."""
    folder, millions, rounds = given
    model, optimizer = built(millions)
    own, theirs = Path(folder) / "meshard", Path(folder) / "dcp"
    checkpointer = Checkpointer(own, keep=1)
    number = iter(range(10**6))

    def save() -> None:
        checkpointer.save(next(number), model, optimizer)

    def tidy() -> None:  # not timed, so that it does not disturb the next contender either
        checkpointer.wait()

    def save_dcp() -> None:
        dcp.save(_states(model, optimizer), checkpoint_id=theirs)

    def load() -> None:
        checkpointer.load(model, optimizer)

    def load_dcp() -> None:
        states = _states(model, optimizer)
        dcp.load(states, checkpoint_id=theirs)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    steps = {"save, meshard": save, "save, dcp": save_dcp}
    saves = _in_turns(steps, rounds, tidy)
    before = [param.detach().to_local().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    steps = {"load, meshard": load, "load, dcp": load_dcp}
    loads = _in_turns(steps, rounds, tidy)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.detach().to_local(), value)

    with CommLedger() as ledger:
        save()
    num_collectives = len(ledger.events)

    # Of a save in the background: until it returns, beside a copy of the same bytes.
    tensors = [param.detach().to_local() for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [each.to_local() for each in state.values() if hasattr(each, "to_local")]
    buffers = [torch.empty_like(each) for each in tensors]

    def copy() -> None:
        for buffer, each in zip(buffers, tensors, strict=True):
            buffer.copy_(each)

    begun: dict[str, list[float]] = {"async_save": [], "a copy of the bytes": []}
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        checkpointer.async_save(next(number), model, optimizer)
        begun["async_save"].append(time.perf_counter() - start)
        checkpointer.wait()
        dist.barrier()
        start = time.perf_counter()
        copy()
        begun["a copy of the bytes"].append(time.perf_counter() - start)
    stops = {name: sorted(each[1:])[rounds // 2] * 1e3 for name, each in begun.items()}
    return {
        "milliseconds": saves | loads | stops,
        "num_collectives": num_collectives,
    }


def run(millions: int = 200, rounds: int = 7) -> dict[str, Any]:
    """Measure; return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = on_ranks(measure, (folder, millions, rounds), 2)
    times = figures["milliseconds"]
    figures["ratios"] = {
        "save": times["save, meshard"] / times["save, dcp"],
        "load": times["load, meshard"] / times["load, dcp"],
        "stop": times["async_save"] / times["a copy of the bytes"],
    }
    print(f"{millions} M parameters with AdamW, 2 ranks, ms", file=sys.stderr)
    for name, value in times.items():
        print(f"  {name:<40}{value:>10.0f}", file=sys.stderr)
    for name, limit in {"save": 1.0, "load": 1.0, "stop": 1.3}.items():
        print(f"  {name:<50}{figures['ratios'][name]:>6.2f}   target {limit:.2f}", file=sys.stderr)
    print(f"  collectives of a second save: {figures['num_collectives']}", file=sys.stderr)
    return figures


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.millions, args.rounds)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
