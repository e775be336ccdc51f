"""CPU time of a training step through sockets, as between hosts, against DDP.

    python tests/benchmarks/cpu_time.py [--ranks 2] [--rounds 40] [--json]

Of all threads of a rank, gloo's too: a copy counts wherever it is made, and a wait does not. What
is over `compute only`, which is the same for everybody, is communication and the host's own work. A
run in which losses differ is void.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.contenders import (
    COMPUTE,
    DDP,
    PEER,
    PEER_WHOLE,
    REPLICATED_SENT,
    SENT,
    SENT_WHOLE,
    Configuration,
)
from tests.benchmarks.rounds import on_ranks, print_figures
from tests.benchmarks.step_time import Result, Task, measure, report

EVERYBODY = (COMPUTE, DDP, REPLICATED_SENT, SENT_WHOLE, SENT, PEER_WHOLE, PEER)
TARGETS = (
    (REPLICATED_SENT, DDP, 1.02),
    (SENT_WHOLE, DDP, 1.10),
    (SENT, DDP, 1.25),
)
CONFIGURATION = Configuration("width 256, batch 2 x 64", 256, 2, context=64)


def run(ranks: int = 2, rounds: int = 40, warm_up: int = 5) -> dict[str, Any]:
    """Measure everybody; return the figures."""
    task = Task(CONFIGURATION, rounds, warm_up, EVERYBODY, time.process_time)
    result: Result = on_ranks(measure, task, ranks)
    print("CPU time of all threads, through sockets", file=sys.stderr)
    print(report(CONFIGURATION, result, TARGETS), file=sys.stderr, flush=True)
    return {
        "milliseconds": {name: times.as_dict() for name, times in result.times.items()},
        "losses": result.losses,
    }


if __name__ == "__main__":
    print_figures(run, __doc__, rounds=40, warm_up=5)
