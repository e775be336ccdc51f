"""Time of ``zero_grad`` of a model that meshard has nothing to do with.

CPU time of one process, with torch's own methods and with those that ``fully_shard`` puts in their
place, in turns; a figure is the smallest over all rounds, in microseconds.

    python tests/benchmarks/zero_grad.py [--tensors 400] [--rounds 400] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard._torch.patches import patch_zero_grad, unpatch_zero_grad
from meshard.optim.hooks import clear_pending, finish_copies

TARGET = 1.05
Figures = dict[str, dict[str, float]]


def measure(tensors: int = 400, rounds: int = 400) -> Figures:
    """Return microseconds of one call, of an optimizer and of a module, with both methods."""
    model = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(tensors))
    optimizer = torch.optim.AdamW(model.parameters())
    samples: dict[str, dict[str, list[float]]] = {
        kind: {"torch": [], "meshard": []} for kind in ("optimizer", "module")
    }
    for number in range(2 * rounds):
        whose = "meshard" if number % 2 else "torch"
        if number % 2:
            patch_zero_grad(finish_copies=finish_copies, clear=clear_pending)
        else:
            unpatch_zero_grad()
        for kind, owner in (("optimizer", optimizer), ("module", model)):
            for param in model:
                param.grad = torch.ones(4)
            begin = time.process_time_ns()
            owner.zero_grad()  # type: ignore[attr-defined]
            samples[kind][whose].append((time.process_time_ns() - begin) / 1e3)
    return {
        kind: {whose: min(times) for whose, times in each.items()} for kind, each in samples.items()
    }


def ratios(figures: Figures) -> dict[str, float]:
    """Return the time with meshard in proportion to that without."""
    return {kind: each["meshard"] / each["torch"] for kind, each in figures.items()}


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description="Time of zero_grad of an unrelated model.")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.tensors, args.rounds)
    if args.json:
        print(json.dumps(figures))
        return
    for kind, ratio in ratios(figures).items():
        each = figures[kind]
        print(
            f"{kind}.zero_grad of {args.tensors} tensors: {each['torch']:.1f} us, with meshard "
            f"{each['meshard']:.1f} us: {ratio:.3f}   target {TARGET:.2f}"
        )


if __name__ == "__main__":
    main()
