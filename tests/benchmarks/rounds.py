"""What benchmarks share: ranks, rounds in turns, and tables.

Contenders take turns, step by step (A B C A B C ...), in one process or process group: whatever
else the machine does falls on all of them alike, so the ratio of two medians of one run means
something.
"""

import os
import socket
import statistics
import tempfile
import time
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_turns(steps, *, rounds, warm_up=0, clock=time.perf_counter, before=None, after=None):
    """Run the steps in turn; return, by name, the seconds and the results of all rounds.

    Args:
        steps: By name.
        rounds: How often each is timed.
        warm_up: How often each runs before that.
        clock: What to time by: ``time.process_time`` for CPU time of all threads.
        before: Called before each step, not timed; ``dist.barrier`` where ranks communicate.
        after: Called after each step, not timed.
    """
    seconds, results = ({name: [] for name in steps} for _ in range(2))
    for number in range(warm_up + rounds):
        for name, step in steps.items():
            if before is not None:
                before()
            start = clock()
            result = step()
            if number >= warm_up:
                seconds[name].append(clock() - start)
                results[name].append(result)
            if after is not None:
                after()
    return seconds, results


def slowest(seconds):
    """Return the seconds of each round on the rank where it lasted longest. All ranks call it."""
    most = torch.tensor(list(seconds.values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(seconds, most.tolist(), strict=True))


def medians(samples, factor=1.0):
    return {name: factor * statistics.median(each) for name, each in samples.items()}


def show(title, heads, rows):
    """Print a table; a row has a name and cells, which are strings."""
    lines = [(title, *heads), *((f"  {name}", *cells) for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    for name, *cells in lines:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False))
        print("  ".join([name.ljust(widths[0]), *right]).rstrip(), flush=True)


def show_ratios(figures, pairs):
    """Print the ratios of two contenders each, where both were measured."""
    found = {pair: [figures[name] for name in pair] for pair in pairs if {*pair} <= {*figures}}
    show("ratios", (), {f"{a} / {b}": [f"{x / y:.3f}"] for (a, b), (x, y) in found.items()})


def give_back_freed_memory():
    """Let malloc of processes that start now return what is freed, for figures of memory.

    By itself glibc keeps it, by a rule that adapts.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"


def on_ranks(body, argument, ranks):
    """Run ``body(argument)`` on gloo ranks, one thread each; return what rank 0 returned."""
    # A file store: no port to be taken by somebody else.
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (body, argument, ranks, folder), nprocs=ranks)
        return torch.load(Path(folder) / "result", weights_only=False)


def _run_rank(rank, body, argument, ranks, folder):
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)
    store, patience = dist.FileStore(f"{folder}/store", ranks), timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    try:
        result = body(argument)
        if rank == 0:
            torch.save(result, Path(folder) / "result")
        dist.barrier()
    finally:
        dist.destroy_process_group()
