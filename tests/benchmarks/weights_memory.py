"""Peak memory of weights out and in, beside what the calls promise and torch's ways to do the same.

A transformer of 204 million parameters in float32, over gloo. The peak is that of each rank's
private memory (``RssAnon``, looked at every half millisecond; pages of files do not count) while
the call runs, less what was there before it. For what loads, that includes the shards. Each call
has processes of its own, in which the same call on a small model has loaded what loads with it;
malloc gives back what is freed at once.
"""

import tempfile
import threading
from collections import deque
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import meshard
from meshard.checkpoint import load_pretrained, save_pretrained, stream_unsharded
from tests.benchmarks.physical import resident
from tests.benchmarks.rounds import give_back_freed_memory, on_ranks, show
from tests.support.models import Transformer

LARGE = {"vocab": 32000, "dim": 1024, "heads": 16, "depth": 11}
SMALL = {"vocab": 512, "dim": 64, "heads": 2, "depth": 2}
PART = 64 * 2**20  # what one gather brings


def set_full_state(model, folder):
    """Read all on rank 0 and broadcast it, as torch does."""
    from safetensors.torch import load_file

    state = load_file(f"{folder}/model.safetensors") if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=options)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
OUT = {
    "stream_unsharded": lambda model, _: deque(stream_unsharded(model), maxlen=0),
    "the same with rank0_only": lambda model, _: deque(
        stream_unsharded(model, rank0_only=True), maxlen=0
    ),
    "save_pretrained, one file": save_pretrained,
    "save_pretrained, 200 MB files": lambda model, folder: save_pretrained(model, folder, "200MB"),
    "get_model_state_dict(full_state_dict)": lambda model, _: get_model_state_dict(
        model, options=FULL
    ),
}
IN = {
    "load_pretrained": load_pretrained,
    "load_file, set_model_state_dict(broadcast)": set_full_state,
}


@contextmanager
def peak_of():
    """Yield a list that has the bytes of the peak once the block has ended."""
    before, over, found = resident("RssAnon"), threading.Event(), [0]

    def look():
        found[0] = max(found[0], resident("RssAnon") - before)

    def watch():
        while not over.wait(0.0005):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        look()


def on_meta(sizes):
    with torch.device("meta"):
        return Transformer(**sizes)


def measure(given):
    """Return the peak of each rank. All ranks call it."""
    name, sizes, folder = given
    of_all = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    for each, place in ((SMALL, "small"), (sizes, "large")):
        model = on_meta(each)
        meshard.fully_shard_units(model)
        if name in OUT:
            meshard.materialize(model)
        with peak_of() as peak:
            (OUT | IN)[name](model, f"{folder}/{place}")
        of_all[dist.get_rank()] = peak[0]
        dist.barrier()
    dist.all_reduce(of_all)
    return of_all.tolist()


def promised(sizes, ranks):
    """Return what the docstrings promise for each call, in bytes, for each rank."""
    all_bytes = [param.nbytes for param in on_meta(sizes).parameters()]
    largest, total = max(all_bytes), sum(all_bytes)
    # While a part is gathered, gloo holds it twice.
    whole, others = largest + 2 * PART + PART / ranks, PART / ranks
    return {
        "stream_unsharded": [whole] * ranks,
        "the same with rank0_only": [whole, *[others] * (ranks - 1)],
        "save_pretrained, one file": [whole, *[others] * (ranks - 1)],
        "save_pretrained, 200 MB files": [whole] * ranks,
        "load_pretrained": [total / ranks + largest / ranks] * ranks,
    }


def run(ranks=2, depth=LARGE["depth"]):
    give_back_freed_memory()
    sizes, rows = LARGE | {"depth": depth}, {}
    limits = promised(sizes, ranks)
    with tempfile.TemporaryDirectory() as folder:
        for name in OUT | IN:
            if name in IN:  # which read what one file has
                on_ranks(measure, ("save_pretrained, one file", sizes, folder), ranks)
            figures = on_ranks(measure, (name, sizes, folder), ranks), limits.get(name, [])
            rows[name] = [" ".join(f"{n / 2**20:.0f}" for n in each) for each in figures]
    show("MiB, by rank", ("peak", "promised"), rows)
