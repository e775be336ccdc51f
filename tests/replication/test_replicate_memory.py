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
from tests.support.integer_model import IntegerModel, integer_batch
from tests.support.live_memory import live_tensor_bytes
from tests.support.models import seeded
from tests.support.ranks import on_ranks
from tests.support.replicated import run
from tests.support.spread import spread

ROOT = Path(__file__).resolve().parents[2]

WIDTH = 256
WHOLE = 6 * WIDTH * WIDTH * 4  # bytes of all parameters
BATCH = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def stack():
    """Only weights of 256 KiB, beside which all else that a step allocates is small."""
    model = seeded(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]), 0)
    for param in model.parameters():
        param.data.div_(WIDTH**0.5)
    return model


def allocations(act):
    """Return the sizes in bytes of all that ``act`` allocated (or, negative, freed)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        act()
    events = seen.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def settle():
    """Let gloo's threads let go of works that are over, and cycles (of DDP) of their memory."""
    dist.barrier()
    time.sleep(0.2)
    gc.collect()


def train_step(model, optimizer):
    model(BATCH + dist.get_rank()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def live_gradient_bytes(model, steps):
    """What making a model trainable and ``steps`` steps have added, gradients still there."""
    held = []

    def act():
        held.append(model())
        optimizer = torch.optim.SGD(held[0].parameters(), lr=1e-6)
        for _ in range(steps - 1):
            train_step(held[0], optimizer)
        held[0](BATCH + dist.get_rank()).square().sum().backward()
        settle()

    settle()
    total = sum(allocations(act))
    grads = [param.grad.clone() for param in held[0].parameters()]
    return (total - WHOLE) / WHOLE, grads


def replicated(**kwargs):
    return lambda: meshard.replicate(stack(), bucket_cap_mb=0.5, **kwargs)


def ddp(as_views):
    return lambda: DistributedDataParallel(
        stack(), bucket_cap_mb=0.5, gradient_as_bucket_view=as_views
    )


MAKERS = {
    "replicate": replicated(),
    "replicate, no views": replicated(gradient_as_bucket_view=False),
    "DDP, views": ddp(True),
    "DDP": ddp(False),
}


def compare_with_ddp(steps):
    found = {name: live_gradient_bytes(make, steps) for name, make in MAKERS.items()}
    for _, grads in found.values():
        for one, two in zip(grads, found["DDP"][1], strict=True):
            assert one.isfinite().all() and one.any()
            assert torch.equal(one, two)
    return {name: share for name, (share, _) in found.items()}


@pytest.mark.slow
def test_gradients_take_their_own_size_once(run_ranks):
    for found in run_ranks(compare_with_ddp, 2, 4):
        assert found["replicate"] == pytest.approx(1.0, abs=1e-3), found
        assert found["replicate, no views"] == pytest.approx(2.0, abs=1e-3), found
        # Not exactly: what gloo's threads free for DDP is not seen, and counts as live.
        assert found["DDP, views"] > 0.999, found
        assert found["DDP"] > 1.999, found


def chain(width, depth):
    model = seeded(nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)]), 0)
    for param in model.parameters():
        param.data.div_(100 * width).add_(torch.eye(width))  # neither vanish nor explode
    return model, torch.linspace(-1, 1, 2 * width).view(2, width)


def transformer():
    layers = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(8)
    ]
    return seeded(nn.Sequential(*layers), 0), torch.linspace(-1, 1, 8 * 256).view(1, 8, 256)


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


def peaks_of(build, wrap, *, keeps_views=True):
    """Return live bytes of gradients at the peak of a step, and of a microbatch that adds to it.

    In units of the bytes of all parameters; and the gradients.
    """
    plain, x = build()
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


def compare_peaks(name):
    build, cap = AT_PEAK[name]
    found = {
        peer: peaks_of(build, partial(wrap, bucket_cap_mb=cap), keeps_views=peer != "DDP")
        for peer, wrap in PEERS.items()
    }
    for one, two in zip(found["replicate"][1], found["DDP"][1], strict=True):
        assert one.any()
        assert torch.equal(one, two)
    sizes = [param.nbytes for param in build()[0].parameters()]
    return {peer: peaks for peer, (peaks, _) in found.items()}, max(sizes) / sum(sizes)


def column_of_page(name):
    """Return the peaks of each peer, of a step and of a microbatch; the same where one stands."""
    page = (ROOT / "docs" / "how-to" / "replicate.md").read_text()
    table = page.partition("| at the peak |")[2].partition("\n\n")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    cells = [row[1 + header.index(name)].replace(" P", "").split("; ") for row in rows]
    return {
        peer: [float(cell[0]), float(cell[-1])] for peer, cell in zip(PEERS, cells, strict=True)
    }


FIRST, *LARGER = AT_PEAK


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]
)
def test_gradients_at_the_peak_take_what_ddp_takes_with_views(run_ranks, name):
    for found, largest in run_ranks(compare_peaks, 2, name):
        for ours, theirs in zip(found["replicate"], found["DDP, views"], strict=True):
            assert ours <= theirs + largest, found
        for peer, peaks in column_of_page(name).items():
            assert found[peer] == pytest.approx(peaks, abs=0.011), found


@on_ranks(2)
def test_a_step_allocates_no_memory_for_gradients():
    model = replicated()()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    places = set()
    for step in range(6):
        model(BATCH + dist.get_rank()).square().sum().backward()
        if step > 1:
            places.add(tuple(param.grad.data_ptr() for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert len(places) == 1
    of_weights = WIDTH * WIDTH * 4
    found = [size for size in allocations(lambda: train_step(model, optimizer)) if size > 0]
    # Autograd's own gradients, which last until they are in the bucket; no bucket among them.
    assert [size for size in found if size >= of_weights] == [of_weights] * 6
    bare = stack()
    plain = torch.optim.SGD(bare.parameters(), lr=1e-6)
    train_step(bare, plain)
    by_itself = [size for size in allocations(lambda: train_step(bare, plain)) if size > 0]
    assert sum(found) - sum(by_itself) < 0.01 * WHOLE


@on_ranks(2)
def test_accumulation_is_in_the_bucket():
    """Between microbatches there is the bucket, and nothing else."""
    model = replicated()()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        train_step(model, optimizer)
    for mode in meshard.GradientSync:

        def act(mode=mode):
            with meshard.gradient_sync(model, mode):
                model(BATCH).square().sum().backward()

        first = sum(allocations(act))
        second = sum(allocations(act))
        assert abs(first) < 0.01 * WHOLE, mode
        assert abs(second) < 0.01 * WHOLE, mode
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
    meshard.replicate(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # imports modules
    settle()
    gc.disable()
    try:
        before = live_tensor_bytes()
        model = meshard.replicate(IntegerModel(), bucket_cap_mb=2e-4, **kwargs)
        watched = [weakref.ref(model), weakref.ref(model._meshard_buckets)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            run(model, integer_batch(step, dist.get_rank()).to(torch.float32))
            if step < steps - 1:
                optimizer.step()
                optimizer.zero_grad()
        for unit in model._meshard_buckets.units:
            watched += [weakref.ref(unit), weakref.ref(unit.lifecycle)]
            watched += [weakref.ref(unit.group), weakref.ref(unit.gradients)]
            watched += [weakref.ref(param) for param in unit.params]
        assert live_tensor_bytes() > before
        del unit, model, optimizer
        assert [type(ref()).__name__ for ref in watched if ref() is not None] == []
        dist.barrier()
        time.sleep(0.2)  # for gloo's threads to let go of works that are over
        assert live_tensor_bytes() == before
    finally:
        gc.enable()


@on_ranks(2)
def test_copies_for_compute_last_as_long_as_a_step():
    model = replicated(mp_policy=MixedPrecisionPolicy(torch.bfloat16))()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

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
