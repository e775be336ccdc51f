"""How much of the communication runs beside compute?

    python tests/benchmarks/overlap.py [--json]

Eight blocks of 20 ms of compute, forward and backward, on two gloo ranks; each all-gather, or each
reduction, is made to take 20 ms longer. What is hidden is the share of these delays that does not
make the step longer. (torch's fully_shard waits for every collective of a CPU mesh where it issues
it: it can hide nothing.) A run in which gradients differ from those without delays is void.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import CommLedger
from meshard._comm.work_communicator import WorkCommunicator
from tests.benchmarks.rounds import on_ranks
from tests.ranks.test_overlap import (
    DELAY,
    DelayedCommunicator,
    DelayedReductions,
    build,
    step_times,
)

DELAYED = {"all_gather": DelayedCommunicator, "reduce_scatter": DelayedReductions}


def measure(op: str) -> dict[str, float]:
    """Delay the collectives of one kind.

    **Collective:** all ranks.
    """
    plain, delayed = step_times(DELAYED[op], (2,))
    model = build(WorkCommunicator, init_device_mesh("cpu", (2,)))
    for _ in range(2):
        with CommLedger(model) as ledger:
            model(torch.ones(2, 8)).sum().backward()
    injected = ledger.counts[op] * DELAY
    return {"step": plain, "delayed": delayed, "hidden": 1 - (delayed - plain) / injected}


def run() -> dict[str, Any]:
    """Measure both kinds; return the figures."""
    figures = {op: on_ranks(measure, op, 2) for op in DELAYED}
    print(
        f"{'collectives delayed by 20 ms':<30}{'ms':>8}{'delayed':>10}{'hidden':>9}",
        file=sys.stderr,
    )
    for op, each in figures.items():
        times = f"{1e3 * each['step']:>8.0f}{1e3 * each['delayed']:>10.0f}"
        print(f"  {op:<28}{times}{each['hidden']:>9.0%}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run()
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
