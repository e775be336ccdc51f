"""Plans are held against runs of the same jobs on gloo ranks.

Counts, bytes and order must agree exactly, and the peak of tensors to 3 %. The run's memory comes
from torch's profiler, which sees every allocation.
"""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard.planning import plan
from tests.planning.jobs import MODELS, make_job
from tests.support.live_memory import settled_tensor_bytes
from tests.support.ranks import on_ranks


@pytest.fixture(autouse=True)
def through_sockets(monkeypatch):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", "0")


@pytest.fixture
def planned(options):
    """Return the plan of each rank."""
    world_size = math.prod(options.get("mesh_shape", (2,)))
    job = partial(make_job, **options)
    return [
        plan(job, world_size=world_size, rank=rank, device_type="cpu") for rank in range(world_size)
    ]


def measured_peak(step):
    """Return the most bytes of tensors that are alive while ``step`` runs."""
    before = settled_tensor_bytes()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return before + max(itertools.accumulate(num_bytes for _, num_bytes in changes))


def check(planned, options):
    step = make_job(**options)
    step()
    with meshard.CommLedger() as ledger:
        step()
    own = planned[dist.get_rank()]
    compared = own.compare(ledger, peak_bytes=measured_peak(step))
    print(options, compared, own.peaks[-1] / compared.measured_peak)
    open(f"/tmp/cmp.{dist.get_rank()}.txt","a").write(f"{options} {compared} {own.peak_phase} {own.peak_unit} {own.bytes_by_kind}\n")
    assert compared.first_difference is None


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"name": name, "reshard": reshard} for name in MODELS for reshard in (True, False)],
    ids=str,
)
def test_models(options, planned):
    check(planned, options)
