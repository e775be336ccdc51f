"""Host time of an optimizer that steps in backward.

Process CPU time on a fake process group, of one thread: all that the optimizer does in a step, be
it called in backward, by ``step`` or by ``zero_grad``. Implementations take turns, step by step.

    python tests/benchmarks/overlap_host_time.py [--units 48] [--layers 6] [--world 8] [--fused]
        [--json]

The other two are ``torch.optim.AdamW(foreach=True)`` on the same DTensors, and on plain tensors of
the sizes of their shards. With ``--fused``, the overlapped one and that on plain tensors are fused.
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

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import OverlappedOptimizer, overlap_optimizer
from tests.benchmarks.host_time import build, parser
from tests.support.fake import fake_group

TARGETS = {"DTensors": 0.25, "plain tensors": 1.0}


class Clock:
    """Adds up the CPU seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begin

        return timed

    def read(self) -> float:
        """Return what was added up since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Timed:
    """A model and its optimizer; ``step`` returns the CPU seconds of the optimizer."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        self._clock = Clock()
        self._x = torch.ones(1, args.width)
        self._model: nn.Module = build("meshard", args.units, args.layers, args.width)
        self._optimizer: torch.optim.Optimizer
        self._plain: list[torch.Tensor] = []
        kernels = "fused" if args.fused else "foreach"
        if kind == "overlapped":
            self._optimizer = overlap_optimizer(
                self._model,
                torch.optim.AdamW,
                lr=0.0,
                **{kernels: True},
            )
            self._time_backward(self._optimizer)
        elif kind == "DTensors":
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, foreach=True)
        else:
            shards = [param.to_local() for param in self._model.parameters()]  # type: ignore[operator]
            self._plain = [nn.Parameter(shard.detach().clone()) for shard in shards]
            self._optimizer = torch.optim.AdamW(self._plain, lr=0.0, **{kernels: True})

    def _time_backward(self, optimizer: OverlappedOptimizer) -> None:
        for module in (self._model, *self._model):  # type: ignore[misc]
            unit = module._meshard_unit  # type: ignore[union-attr]
            unit.on_reduced = [self._clock.around(each) for each in unit.on_reduced]

    def step(self) -> float:
        """Run a training step."""
        self._model(self._x).sum().backward()
        for param in self._plain:
            param.grad = torch.zeros_like(param)
        self._clock.around(self._optimizer.step)()
        self._clock.around(self._optimizer.zero_grad)()
        if self._plain:
            self._model.zero_grad()
        return self._clock.read()


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Return the optimizer's microseconds per unit and step, by implementation."""
    torch.set_num_threads(1)
    with fake_group(args.world):
        runs = {kind: Timed(kind, args) for kind in ("overlapped", *TARGETS)}
        seconds: dict[str, list[float]] = {kind: [] for kind in runs}
        for number in range(args.warm_up + args.rounds):
            for kind, timed in runs.items():
                taken = timed.step()
                if number >= args.warm_up:
                    seconds[kind].append(taken)
        del runs, timed
    return {kind: 1e6 / args.units * statistics.median(each) for kind, each in seconds.items()}


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """Return what the overlapped optimizer takes of each of the others."""
    return {kind: figures["overlapped"] / figures[kind] for kind in TARGETS}


def report(args: argparse.Namespace, figures: dict[str, float]) -> str:
    """Return a table."""
    lines = [f"us of CPU time per unit ({args.layers} parameters, world {args.world})"]
    lines += [f"  {kind:<24}{value:>8.0f}" for kind, value in figures.items()]
    for kind, ratio in ratios(figures).items():
        lines.append(f"  overlapped / {kind:<24}{ratio:>8.2f}   target {TARGETS[kind]:.2f}")
    return "\n".join(lines)


def run(layers: tuple[int, ...] = (1, 12, 48)) -> Any:
    """Measure several sizes; return the figures."""
    found = {}
    for count in layers:
        args = command_line().parse_args(["--layers", str(count)])
        figures = measure(args)
        print(report(args, figures), file=sys.stderr, flush=True)
        found[f"{count} parameters"] = {"us": figures, "ratios": ratios(figures)}
    return found


def command_line() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = parser(__doc__)
    made.add_argument("--fused", action="store_true", help="fused kernels for all, not foreach")
    return made


if __name__ == "__main__":
    _args = command_line().parse_args()
    _figures = measure(_args)
    print(json.dumps(_figures) if _args.json else report(_args, _figures))
