"""Plans are held against runs of the same jobs on gloo ranks.

Counts, bytes and order must agree exactly, and the peak of tensors to 3 %. The run's memory comes
from torch's profiler, which sees every allocation.
"""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard._comm.streams import StreamCommunicator
from meshard._communicators import communicators_from
from meshard.planning import plan
from tests.support.fake_device import FakeDevice
from tests.planning.jobs import MODELS, make_job
from tests.support.ranks import on_ranks


@pytest.fixture(autouse=True)
def through_sockets(monkeypatch):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", "0")


@pytest.fixture(params=["cpu"])
def device_type(request):
    return request.param


@pytest.fixture
def planned(options, device_type):
    """Return the plan of each rank."""
    world_size = math.prod(options.get("mesh_shape", (2,)))
    job = partial(make_job, **options)
    return [
        plan(job, world_size=world_size, rank=rank, device_type=device_type)
        for rank in range(world_size)
    ]


def measured(make_step):
    """Return the ledger of the second step, and the most bytes of tensors alive in the third."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step = make_step()
        step()
        with meshard.CommLedger() as ledger:
            step()
        with torch.profiler.record_function("measured"):
            step()
    events = profiler.profiler.kineto_results.events()
    (begin,) = (event.start_ns() for event in events if event.name() == "measured")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = zip(changes, itertools.accumulate(num_bytes for _, num_bytes in changes), strict=True)
    return ledger, max(total for (time, _), total in alive if time >= begin)


def check(planned, options, device_type):
    with contextlib.ExitStack() as stack:
        if device_type == "cuda":
            make = lambda _: StreamCommunicator(FakeDevice())
            stack.enter_context(communicators_from(make))
        ledger, peak = measured(partial(make_job, **options))
    own = planned[dist.get_rank()]
    compared = own.compare(ledger, peak_bytes=peak)
    open(f"/tmp/cmp.{dist.get_rank()}.txt", "a").write(
        f"{device_type} {options} {compared} {own.peak_phase} {own.peak_unit} {own.bytes_by_kind}\n"
    )
    assert compared.first_difference is None


MODES = [("FULL", 2), ("REDUCE_SCATTER", 3), ("NONE", 3)]


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"name": name, "reshard": reshard} for name in MODELS for reshard in (True, False)],
    ids=str,
)
def test_models(options, planned, device_type):
    check(planned, options, device_type)


@on_ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {"name": name, "mesh_shape": shape, "reshard": reshard}
        for name in MODELS
        for shape in ((4,), (2, 2))
        for reshard in ((True, 2) if shape == (4,) else (False,))
    ],
    ids=str,
)
def test_four(options, planned, device_type):
    check(planned, options, device_type)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"name": name, "mode": mode, "num_microbatches": number}
        for name in MODELS
        for mode, number in MODES
    ],
    ids=str,
)
def test_modes(options, planned, device_type):
    check(planned, options, device_type)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"name": name, "how": how}
        for name in MODELS
        for how in ("overlap", "offload", "owners", "flat")
    ],
    ids=str,
)
def test_how(options, planned, device_type):
    check(planned, options, device_type)
