"""How long does a save last, a load, and a step that a save in the background interrupts?

    python tests/benchmarks/checkpoint_time.py [--millions 200] [--rounds 7] [--json]

Two ranks save and load a sharded model with the state of AdamW, in turns with
``torch.distributed.checkpoint``, and with ``torch_checkpointing`` if it is installed. All files are
synced: those of the latter here, as it syncs none; it compares no checksums either. Times are of
the slowest rank. The values that were loaded are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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

torch_checkpointing: Any
try:
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:  # it is in no environment of the project
    torch_checkpointing = None

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


class TorchCheckpointing:
    """The package of that name, as it runs on CPUs: without direct I/O, which ext4 refuses here."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        config = torch_checkpointing.CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = config.build()

    @property
    def _path(self) -> Path:
        return self._folder / str(self._number)

    def save(self, states: dict[str, Any]) -> None:
        self._number += 1
        self._manager.save(str(self._path), states)
        dist.barrier()  # rank 0 renames the folder
        rank = dist.get_rank()
        for path in [*self._path.glob(f"*_{rank}.pt"), self._path]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def tidy(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._folder.glob("*"):
                if path != self._path:
                    shutil.rmtree(path)

    def load(self, states: dict[str, Any]) -> None:
        self._manager.load(str(self._path), into=states)


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
    other = TorchCheckpointing(Path(folder) / "other") if torch_checkpointing else None

    def save() -> None:
        checkpointer.save(next(number), model, optimizer)

    def tidy() -> None:  # not timed, so that it does not disturb the next contender either
        checkpointer.wait()
        if other is not None:
            other.tidy()

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

    def save_other() -> None:
        assert other is not None
        other.save(_states(model, optimizer))

    def load_other() -> None:
        assert other is not None
        states = _states(model, optimizer)
        other.load(states)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    steps = {"save, meshard": save, "save, dcp": save_dcp}
    if other is not None:
        steps["save, torch_checkpointing"] = save_other
    saves = _in_turns(steps, rounds, tidy)
    before = [param.detach().to_local().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    steps = {"load, meshard": load, "load, dcp": load_dcp}
    if other is not None:
        steps["load, torch_checkpointing"] = load_other
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
    if torch_checkpointing is not None:
        for what in ("save", "load"):
            ratio = times[f"{what}, meshard"] / times[f"{what}, torch_checkpointing"]
            figures["ratios"][f"{what} / torch_checkpointing"] = ratio
    print(f"{millions} M parameters with AdamW, 2 ranks, ms", file=sys.stderr)
    for name, value in times.items():
        print(f"  {name:<40}{value:>10.0f}", file=sys.stderr)
    targets = {"save": 1.0, "load": 1.0, "stop": 1.3}
    for name, ratio in figures["ratios"].items():
        target = targets.get(name.split(" ")[0])
        print(f"  {name:<50}{ratio:>6.2f}   target {target:.2f}", file=sys.stderr)
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
