"""How much do steps of the training slow down while a checkpoint is written beside them?

    python tests/benchmarks/checkpoint_background.py [--millions 50] [--rounds 5] [--json]

Two ranks train a small model, in turns without a save, with ``async_save`` of a large one (which
writes in a thread), and with a process for each rank that writes the same bytes in the same way
from shared memory. Times are of the slowest rank, of steps that began while it wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard.checkpoint import Checkpointer
from meshard.checkpoint._protocol.saving import _write_tensor
from meshard.checkpoint._protocol.storage import storage_at
from tests.benchmarks.checkpoint_time import WIDTH, built
from tests.benchmarks.rounds import on_ranks

BATCH = 16
MILLIONS = 2  # of parameters that are trained


def _write_on_demand(buffers: list[torch.Tensor], folder: str, pipe: Connection) -> None:
    """Write the buffers into a new file each time that the pipe says so. Runs in a process."""
    torch.set_num_threads(1)
    storage, number = storage_at(folder), 0
    while pipe.recv():
        file = f"{number % 2}"
        storage.remove_file(file)
        sink = storage.create(file)
        for buffer in buffers:
            _write_tensor(sink, buffer)
        sink.close()
        number += 1
        pipe.send(True)


class Process:
    """A process beside a rank, with the memory that it writes."""

    def __init__(self, tensors: list[torch.Tensor], folder: Path) -> None:
        folder.mkdir(parents=True)
        self._tensors = tensors
        self._buffers = [torch.empty_like(each).share_memory_() for each in tensors]
        self._pipe, theirs = mp.Pipe()
        context = mp.get_context("spawn")
        args = (self._buffers, str(folder), theirs)
        self._process = context.Process(target=_write_on_demand, args=args)
        self._process.start()
        self._is_done = True

    @torch.no_grad()
    def save(self) -> None:
        for buffer, each in zip(self._buffers, self._tensors, strict=True):
            buffer.copy_(each)
        self._is_done = False
        self._pipe.send(True)

    def done(self) -> bool:
        if not self._is_done and self._pipe.poll():
            self._is_done = self._pipe.recv()
        return self._is_done

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def measure(given: tuple[str, int, int]) -> dict[str, Any]:
    """Run on each rank; return milliseconds of the median step, and of a save, by contender."""
    folder, millions, rounds = given
    model, optimizer = built(millions)
    tensors = [param.detach().to_local() for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [each.to_local() for each in state.values() if hasattr(each, "to_local")]
    process = Process(tensors, Path(folder) / f"process{dist.get_rank()}")
    checkpointer = Checkpointer(Path(folder) / "thread", keep=1)
    trained, trainer = built(MILLIONS)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        trained(batch).square().mean().backward()
        trainer.step()
        trainer.zero_grad()

    number = iter(range(10**6))

    def start_thread() -> Callable[[], bool]:
        return checkpointer.async_save(next(number), model, optimizer).done

    def start_process() -> Callable[[], bool]:
        process.save()
        return process.done

    left = 0

    def start_nothing() -> Callable[[], bool]:
        nonlocal left
        left = 10

        def done() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        return done

    contenders = {"none": start_nothing, "thread": start_thread, "process": start_process}
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    lasts: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, start in contenders.items():
            dist.barrier()
            done = start()
            began = time.perf_counter()
            while True:
                over = torch.tensor(float(done()))
                dist.all_reduce(over, dist.ReduceOp.MIN)  # until all ranks have written
                if over:
                    break
                before = time.perf_counter()
                step()
                seconds = torch.tensor(time.perf_counter() - before)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn:  # the first is to warm up
                    steps[name].append(float(seconds))
            if turn:
                lasts[name].append(time.perf_counter() - began)
            checkpointer.wait()
    process.close()
    return {
        "step": {name: statistics.median(each) * 1e3 for name, each in steps.items()},
        "steps": {name: len(each) for name, each in steps.items()},
        "save": {name: statistics.median(each) * 1e3 for name, each in lasts.items()},
    }


def run(millions: int = 50, rounds: int = 5) -> dict[str, Any]:
    """Measure; return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = on_ranks(measure, (folder, millions, rounds), 2)
    print(f"{millions} M parameters with AdamW are saved, 2 ranks, ms", file=sys.stderr)
    for name, value in figures["step"].items():
        ratio, count = value / figures["step"]["none"], figures["steps"][name]
        print(
            f"  {name:<10} step {value:8.1f} ({ratio:.2f}, {count} steps), until written "
            f"{figures['save'][name]:8.0f}",
            file=sys.stderr,
        )
    return figures


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.millions, args.rounds)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
