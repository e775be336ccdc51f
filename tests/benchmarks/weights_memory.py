"""Peak memory of weights out and in, beside what the calls promise and torch's ways to do the same.

    python tests/benchmarks/weights_memory.py [--ranks 2] [--small] [--json]

A transformer of 204 million parameters in float32, over gloo. The peak is that of each rank's
private memory (``RssAnon``, looked at every half millisecond; pages of files do not count) while
the call runs, less what was there before it. For what loads, that includes the shards. Each call
has processes of its own, in which the same
call on a small model has loaded what loads with it; malloc gives back what is freed at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import meshard
from meshard.checkpoint import load_pretrained, save_pretrained, stream_unsharded
from tests.benchmarks.rounds import on_ranks
from tests.support.models import Transformer
from tests.support.physical import resident

MIB = 2**20
LARGE = {"vocab": 32000, "dim": 1024, "heads": 16, "depth": 11}
SMALL = {"vocab": 512, "dim": 64, "heads": 2, "depth": 2}
MAX_BYTES = 64 * MIB  # the default


class Case(NamedTuple):
    """A call to be measured."""

    name: str
    sizes: dict[str, int]
    folder: str


@contextmanager
def peak_of() -> Iterator[list[int]]:
    """Yield a list that has the bytes of the peak once the block has ended."""
    before, found = resident("RssAnon"), [0]
    highest, over = before, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.0005):
            highest = max(highest, resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        found[0] = max(highest, resident("RssAnon")) - before


def sharded(sizes: dict[str, int]) -> nn.Module:
    """Return the model on the meta device, sharded."""
    with torch.device("meta"):
        model = Transformer(**sizes)
    meshard.fully_shard_units(model)
    return model


def consume(**kwargs: Any) -> Callable[[nn.Module, str], object]:
    """Return a call that streams and drops every tensor."""

    def call(model: nn.Module, folder: str) -> None:
        for pair in stream_unsharded(model, **kwargs):
            del pair

    return call


def full_state(model: nn.Module, folder: str) -> None:
    """Gather all to rank 0, as torch does."""
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def set_full_state(model: nn.Module, folder: str) -> None:
    """Read all on rank 0 and broadcast it, as torch does."""
    from safetensors.torch import load_file

    state = load_file(f"{folder}/model.safetensors") if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=options)


OUT: dict[str, Callable[[nn.Module, str], object]] = {
    "stream_unsharded": consume(),
    "the same with rank0_only": consume(rank0_only=True),
    "save_pretrained, one file": lambda model, folder: save_pretrained(model, folder),
    "save_pretrained, 200 MB files": lambda model, folder: save_pretrained(model, folder, "200MB"),
    "get_model_state_dict(full_state_dict)": full_state,
}
IN: dict[str, Callable[[nn.Module, str], object]] = {
    "load_pretrained": lambda model, folder: load_pretrained(model, folder),
    "load_file, set_model_state_dict(broadcast)": set_full_state,
}


def measure(case: Case) -> list[int]:
    """Return the peak of each rank. **Collective:** all ranks."""
    call = (OUT | IN)[case.name]
    of_all = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    for sizes, place in ((SMALL, f"{case.folder}/small"), (case.sizes, f"{case.folder}/large")):
        model = sharded(sizes)
        if case.name in OUT:
            meshard.materialize(model)
        with peak_of() as peaks:
            call(model, place)
        of_all[dist.get_rank()] = peaks[0]
        dist.barrier()
    dist.all_reduce(of_all)
    found: list[int] = of_all.tolist()
    return found


def promised(sizes: dict[str, int], ranks: int) -> dict[str, list[float]]:
    """Return what the docstrings promise for each call, in bytes, for each rank."""
    with torch.device("meta"):
        model = Transformer(**sizes)
    all_bytes = [param.nbytes for param in model.parameters()]
    largest, total = max(all_bytes), sum(all_bytes)

    def gathered(max_bytes: int) -> float:
        batch = min(total, max(max_bytes, largest))
        # While it is gathered, gloo holds it twice; then one tensor is made of it.
        return max(2 * batch + batch / ranks, batch + largest)

    first, others = gathered(MAX_BYTES), min(total, max(MAX_BYTES, largest)) / ranks
    return {
        "stream_unsharded": [first] * ranks,
        "the same with rank0_only": [first, *[others] * (ranks - 1)],
        "save_pretrained, one file": [first, *[others] * (ranks - 1)],
        "save_pretrained, 200 MB files": [first] * ranks,
        "load_pretrained": [total / ranks + largest / ranks] * ranks,
    }


def run(ranks: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Measure every call; return the figures in bytes."""
    # For the processes that start now: glibc would keep what is freed, by a rule that adapts.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    figures: dict[str, Any] = {}
    expected = promised(sizes, ranks)
    with tempfile.TemporaryDirectory() as folder:
        for name in OUT | IN:
            if name in IN:  # which read what one file has
                on_ranks(measure, Case("save_pretrained, one file", sizes, folder), ranks)
            peaks = on_ranks(measure, Case(name, sizes, folder), ranks)
            figures[name] = {"peaks": peaks, "promised": expected.get(name)}
    return figures


def report(figures: dict[str, Any]) -> str:
    """Return a table in MiB."""
    lines = [f"{'MiB, by rank':<44}{'peak':>20}{'promised':>20}"]
    for name, row in figures.items():
        peaks = " ".join(f"{each / MIB:.0f}" for each in row["peaks"])
        limits = " ".join(f"{each / MIB:.0f}" for each in row["promised"] or ())
        lines.append(f"{name:<44}{peaks:>20}{limits:>20}")
    return "\n".join(lines)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.ranks, SMALL if args.small else LARGE)
    print(json.dumps(figures) if args.json else report(figures))


if __name__ == "__main__":
    main()
