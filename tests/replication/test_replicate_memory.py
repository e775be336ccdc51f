"""Replicated modules: the memory of gradients, and when it is given back."""

import gc
import itertools
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import meshard
from meshard import MixedPrecisionPolicy
from tests.support import insides
from tests.support.integer_model import IntegerModel, integer_batch
from tests.support.live_memory import live_tensor_bytes, settled_tensor_bytes
from tests.support.models import seeded
from tests.support.ranks import on_ranks
from tests.support.replicated import SMALL, run
from tests.support.spread import slow, spread

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "replicate.md"

WIDTH = 256
WEIGHT = WIDTH * WIDTH * 4  # bytes
WHOLE = 6 * WEIGHT
BATCH = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def stack():
    """Only weights of 256 KiB, beside which all else that a step allocates is small."""
    model = seeded(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]))
    for param in model.parameters():
        param.data.div_(WIDTH**0.5)
    return model


def replicated(**kwargs):
    """Return a replicated stack in buckets of two weights, and its optimizer."""
    model = meshard.replicate(stack(), bucket_cap_mb=0.5, **kwargs)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def backward(model):
    model(BATCH + dist.get_rank()).float().square().sum().backward()


def train_step(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def allocations(act):
    """Return the sizes in bytes of all that ``act`` allocated (or, negative, freed)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        act()
    events = seen.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(("as_views", "copies"), [(True, 1), (False, 2)])
def test_gradients_take_their_own_size_once_or_twice_if_they_are_no_views(as_views, copies):
    made = []

    def act():
        made.extend(replicated(gradient_as_bucket_view=as_views))
        for _ in range(3):
            train_step(*made)
        backward(made[0])
        settled_tensor_bytes()

    settled_tensor_bytes()
    added = sum(allocations(act)) - WHOLE
    assert added / WHOLE == pytest.approx(copies, abs=1e-3)
    for param in made[0].parameters():
        assert param.grad.isfinite().all() and param.grad.any()


def chain(width, depth):
    model = seeded(nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)]))
    for param in model.parameters():
        param.data.div_(100 * width).add_(torch.eye(width))  # neither vanish nor explode
    return model, torch.linspace(-1, 1, 2 * width).view(2, width)


def transformer():
    layers = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(8)
    ]
    return seeded(nn.Sequential(*layers)), torch.linspace(-1, 1, 8 * 256).view(1, 8, 256)


# With the size of buckets: several, or one that is nearly all. Activations are small beside them.
AT_PEAK = {
    "24 weights of 1 MiB": (partial(chain, 512, 24), 6.0),
    "8 layers of a transformer": (transformer, 6.0),
    "100 weights of 64 KiB": (partial(chain, 128, 100), 6.0),
    "96 weights of 1 MiB": (partial(chain, 512, 96), 25.0),
}
# In the order of the rows of the page.
PEERS = {
    "replicate": meshard.replicate,
    "DDP, views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "DDP": DistributedDataParallel,
}


def peaks_of(plain, x, wrap, *, keeps_views):
    """Return live bytes of gradients at the peak of a step, and of a microbatch that adds to it.

    In units of the bytes of all parameters; and the gradients.
    """
    whole = sum(param.nbytes for param in plain.parameters())
    model, x = wrap(plain), x + dist.get_rank()

    def backward():
        model(x).square().mean().backward()

    for _ in range(3):  # until buckets are where they stay
        backward()
        model.zero_grad()
    # Before a step there are the buckets; before a microbatch, gradients that are no views too.
    peaks = [1 + max(itertools.accumulate(allocations(backward))) / whole]
    model.zero_grad()
    with model.no_sync():
        backward()
        start = 1 if keeps_views else 2
        peaks.append(start + max(itertools.accumulate(allocations(backward))) / whole)
    backward()
    return peaks, [param.grad.clone() for param in plain.parameters()]


def rows_of_page(name):
    """Return the peaks of each peer, of a step and of a microbatch; the same where one stands."""
    table = PAGE.read_text().partition("| at the peak |")[2].partition("\n\n")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    cells = [row[1 + header.index(name)].replace(" P", "").split("; ") for row in rows]
    return [[float(cell[0]), float(cell[-1])] for cell in cells]


FIRST, *LARGER = AT_PEAK


@on_ranks(2)
@pytest.mark.parametrize("name", [FIRST, *(slow(name) for name in LARGER)])
def test_gradients_at_the_peak_take_what_ddp_takes_with_views(name):
    build, cap = AT_PEAK[name]
    found, grads = {}, {}
    for peer, wrap in PEERS.items():
        wrap = partial(wrap, bucket_cap_mb=cap)
        found[peer], grads[peer] = peaks_of(*build(), wrap, keeps_views=peer != "DDP")
    for one, two in zip(grads["replicate"], grads["DDP"], strict=True):
        assert one.any()
        assert torch.equal(one, two)
    sizes = [grad.nbytes for grad in grads["DDP"]]
    for ours, theirs in zip(found["replicate"], found["DDP, views"], strict=True):
        assert ours <= theirs + max(sizes) / sum(sizes), found
    for peaks, on_page in zip(found.values(), rows_of_page(name), strict=True):
        assert peaks == pytest.approx(on_page, abs=0.011), found


@on_ranks(2)
def test_a_step_allocates_no_memory_for_gradients():
    model, optimizer = replicated()
    places = set()
    for step in range(6):
        backward(model)
        grads = [param.grad for param in model.parameters()]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 3
        if step > 0:  # since the buckets were made anew
            places.add(tuple(grad.data_ptr() for grad in grads))
        optimizer.step()
        optimizer.zero_grad()
    assert len(places) == 1
    del grads
    found = [size for size in allocations(lambda: train_step(model, optimizer)) if size > 0]
    # Autograd's own gradients, which last until they are in the bucket; no bucket among them.
    assert [size for size in found if size >= WEIGHT] == [WEIGHT] * 6
    bare = stack()
    plain = torch.optim.SGD(bare.parameters(), lr=1e-6)
    train_step(bare, plain)
    by_itself = [size for size in allocations(lambda: train_step(bare, plain)) if size > 0]
    assert sum(found) - sum(by_itself) < 0.01 * WHOLE


@on_ranks(2)
def test_between_microbatches_there_is_the_bucket_and_nothing_else():
    model, optimizer = replicated()
    for _ in range(3):
        train_step(model, optimizer)
    for mode in meshard.GradientSync:
        for _ in range(2):
            with meshard.gradient_sync(model, mode):
                added = sum(allocations(lambda: backward(model)))
            assert abs(added) < 0.01 * WHOLE, mode
        meshard.finalize_gradients(model)
        model.zero_grad()


@on_ranks(2)
@spread(
    kwargs=[
        {},
        {"gradient_as_bucket_view": False, "broadcast_buffers": True},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    ],
    steps=[3, 1],
)
def test_a_deleted_model_frees_every_byte_without_the_garbage_collector(steps, kwargs):
    def make():
        return meshard.replicate(IntegerModel(), bucket_cap_mb=SMALL, **kwargs)

    run(make(), integer_batch(0, dist.get_rank()))  # imports modules and fills caches
    before = settled_tensor_bytes()
    gc.disable()
    try:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            run(model, integer_batch(step, dist.get_rank()))
            if step < steps - 1:
                optimizer.step()
                optimizer.zero_grad()
        watched = [weakref.ref(model), *insides.engine_refs(model)]
        assert live_tensor_bytes() > before
        del model, optimizer
        assert insides.left_alive(watched) == []
        dist.barrier()
        time.sleep(0.2)  # for gloo's threads to let go of works that are over
        assert live_tensor_bytes() == before
    finally:
        gc.enable()


@on_ranks(2)
def test_copies_for_compute_last_as_long_as_a_step():
    model, optimizer = replicated(mp_policy=MixedPrecisionPolicy(torch.bfloat16))

    def bytes_at_rest():
        with torch.no_grad():
            model(BATCH)  # the next forward frees the sums of gradients that were cleared
        return live_tensor_bytes()

    for _ in range(3):
        train_step(model, optimizer)
    resting = bytes_at_rest()
    loss = model(BATCH).float().square().sum()
    assert live_tensor_bytes() - resting == pytest.approx(WHOLE / 2, rel=0.02)
    loss.backward()
    del loss
    model.zero_grad()
    assert bytes_at_rest() == resting
