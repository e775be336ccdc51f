"""CPU time of a training step through sockets, as between hosts, against DDP.

Of all threads of a rank, gloo's too: a copy counts wherever it is made, and a wait does not. What
is over `compute only`, which is the same for everybody, is communication and the host's own work. A
run in which losses differ is void.
"""

import time

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
from tests.benchmarks.rounds import on_ranks
from tests.benchmarks.step_time import Task, measure, report

BESIDE = (REPLICATED_SENT, SENT_WHOLE, SENT, PEER_WHOLE, PEER)
CONFIGURATION = Configuration("width 256, batch 2 x 64", 256, 2, context=64)


def run(ranks=2, rounds=40, warm_up=5):
    task = Task(CONFIGURATION, rounds, warm_up, (COMPUTE, DDP, *BESIDE), time.process_time)
    title = f"CPU time of all threads, through sockets, {CONFIGURATION.name}"
    report(title, on_ranks(measure, task, ranks), [(name, DDP) for name in BESIDE])
