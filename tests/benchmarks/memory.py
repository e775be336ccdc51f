"""Peak memory of a training step.

Beside the measured peak stands what the formula of docs/explanation/memory.md gives; it is one for
ranks that send through sockets. Memory that ranks of one host share counts once, on the rank that
has made it.

The peak of a step in steady state, with everything in it: shards, gradients, AdamW's state,
activations, what is gathered, and gloo's own buffers. It is that of the resident set of rank 0, in
a process of its own for each contender, less what was resident before the model was built; malloc
gives back what is freed at once, so nothing else counts. A run in which losses differ is void.
"""

import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.benchmarks import contenders
from tests.benchmarks.contenders import (
    OURS,
    OURS_WHOLE,
    PEER,
    PEER_WHOLE,
    SENT,
    SENT_WHOLE,
    WIDTH_512,
    Configuration,
)
from tests.benchmarks.physical import metered, resident
from tests.benchmarks.rounds import give_back_freed_memory, on_ranks, show, show_ratios
from tests.support.memory_formula import Sizes, peaks

RESHARDING, WHOLE = (OURS, SENT), (OURS_WHOLE, SENT_WHOLE)
EVERYBODY = (PEER, *RESHARDING, PEER_WHOLE, *WHOLE)
PAIRS = (*((ours, PEER) for ours in RESHARDING), *((ours, PEER_WHOLE) for ours in WHOLE))
WARM_UP, STEPS = 3, 5
TINY = Configuration("what loads with the first step", width=64, batch=1, context=16, depth=2)


def measure(name):
    """Return the bytes at the peak of a step and after it, and the loss. All ranks call it."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    # What is loaded with the first step is nobody's.
    contenders.trainer(contenders.make(name, TINY, mesh), TINY.make_batch(rank))()
    before, found = resident("VmRSS"), []
    with metered() as meter:
        model = contenders.make(name, WIDTH_512, mesh)
        step = contenders.trainer(model, WIDTH_512.make_batch(rank))
        for _ in range(WARM_UP):
            step()
        for _ in range(STEPS):
            meter.begin_anew()
            loss = step()
            meter.look()
            found.append(meter.peak - before)
    at_rest, mean = resident("VmRSS") - before, torch.tensor(loss)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return {"peak": statistics.median(found), "at rest": at_rest, "loss": mean.item()}


def bytes_of(module):
    return sum(param.nbytes for param in module.parameters())


def saved_by(modules, run):
    """Return what autograd saves for backward, up to the end of each module since the last.

    Args:
        modules: In the order of forward; plain ones. To the last counts what comes after it.
        run: Runs the forward, and returns what keeps its graph.
    """
    params = {p.untyped_storage().data_ptr() for each in modules for p in each.parameters()}
    seen = {}  # kept, so that no address comes twice
    saved = [0] * len(modules)
    place = 0

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.data_ptr() not in params:
            seen[storage.data_ptr()] = storage
            saved[min(place, len(modules) - 1)] += storage.nbytes()
        return tensor

    def step(*_):
        nonlocal place
        place += 1

    handles = [module.register_forward_hook(step) for module in modules]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    for handle in handles:
        handle.remove()
    return saved


def formula(ranks, *, reshards, configuration=WIDTH_512, device=None):
    model = configuration.make_model(device)
    tokens, following = configuration.make_batch(0, device)

    def loss():
        logits = model(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    units = [bytes_of(block) for block in model.blocks]
    sizes = Sizes(
        units=units,
        largest=[max(p.nbytes for p in block.parameters()) for block in model.blocks],
        activations=saved_by(list(model.blocks), loss),
        root=bytes_of(model) - sum(units),
        shards=ranks,
        reshards=reshards,
    )
    return max(peaks(sizes))


def run(ranks=2):
    give_back_freed_memory()
    figures = {name: on_ranks(measure, name, ranks) for name in EVERYBODY}
    for each in figures.values():
        if abs(each["loss"] - figures[PEER]["loss"]) > 1e-4 * figures[PEER]["loss"]:
            raise RuntimeError(f"losses differ, so no peak counts: {figures}")
    rows = {
        name: [f"{each['peak'] / 2**20:.1f}", f"{each['at rest'] / 2**20:.1f}"]
        for name, each in figures.items()
    }
    for reshards, names in ((True, RESHARDING), (False, WHOLE)):
        expected = formula(ranks, reshards=reshards)
        for name in names:
            rows[name] += f"{expected / 2**20:.1f}", f"{figures[name]['peak'] / expected:.3f}"
    show(f"{WIDTH_512.name}, MiB", ("peak", "at rest", "formula", "peak / formula"), rows)
    show_ratios({name: each["peak"] for name, each in figures.items()}, PAIRS)
