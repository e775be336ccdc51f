"""Plans are held against runs of the same jobs on gloo ranks.

Counts, bytes and order must agree exactly, and the peak of tensors to 3 %. The run's memory comes
from torch's profiler, which sees every allocation, those of gloo too.
"""

import itertools
import math
import statistics
import time
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard.planning import plan
from tests.planning import families
from tests.planning.jobs import MODELS, make_job
from tests.support.ranks import on_ranks
from tests.support.spread import mostly_slow

TWO_RANKS = [
    {"name": "adapters", "how": "overlap"},
    *({"name": name, "reshard": reshard} for name in MODELS for reshard in (True, False)),
    *(
        {"name": name, "mode": mode, "num_microbatches": number}
        for name in ("gpt", "llama", "checkpointed")
        for mode, number in [("FULL", 2), ("REDUCE_SCATTER", 3), ("NONE", 3)]
    ),
    *({"name": "gpt", "how": how} for how in ("overlap", "offload", "local", "owners")),
    {"name": "llama", "how": "owners"},
]
FOUR_RANKS = [
    {"name": "gpt", "mesh_shape": (4,)},
    {"name": "checkpointed", "mesh_shape": (4,)},
    {"name": "llama", "mesh_shape": (4,), "reshard": 2},
    {"name": "llama", "mesh_shape": (2, 2), "reshard": False},
    {"name": "convolutions", "mesh_shape": (2, 2)},
    {"name": "adapters", "mesh_shape": (2, 2)},
]


@pytest.fixture(autouse=True)
def through_sockets(monkeypatch):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", "0")


@pytest.fixture
def planned_families(name):
    plan_of = partial(plan, partial(families.make_job, name), world_size=2, device_type="cpu")
    return [plan_of(rank=rank) for rank in range(2)]


@pytest.fixture
def planned(options):
    world_size = math.prod(options.get("mesh_shape", (2,)))
    plan_of = partial(plan, partial(make_job, **options), world_size=world_size)
    return [plan_of(rank=rank, device_type="cpu") for rank in range(world_size)]


def measured(make_step, num_steps=3):
    """Return the ledger of the second step, and the peak of tensors alive in the median later one.

    The profiler does not see what threads of gloo free, so each wait gives them time to drop their
    reference first. A gather that is done early has freed a buffer of gloo that the plan has alive.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    wait = dist.Work.wait

    def wait_for_threads(work, *timeout):
        is_done = wait(work, *timeout)
        time.sleep(0.003)
        return is_done

    warnings.filterwarnings("ignore", ".*Profiler clears events")  # as torch 2.11 tells each user
    with (
        mock.patch.object(dist.Work, "wait", wait_for_threads),
        torch.profiler.profile(activities=activities, profile_memory=True) as profiler,
    ):
        step = make_step()
        step()
        with meshard.CommLedger() as ledger:
            step()
        for _ in range(num_steps):
            with torch.profiler.record_function("measured"):
                step()
    events = profiler.profiler.kineto_results.events()
    begins = sorted(event.start_ns() for event in events if event.name() == "measured")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks = dict.fromkeys(begins, 0)
    for (at, _), total in zip(changes, itertools.accumulate(n for _, n in changes), strict=True):
        step_begin = max((begin for begin in begins if begin <= at), default=None)
        if step_begin is not None:
            peaks[step_begin] = max(peaks[step_begin], total)
    return ledger, statistics.median(peaks.values())


def check(planned, job):
    ledger, peak = measured(job)
    compared = planned[dist.get_rank()].compare(ledger, peak_bytes=peak)
    print(job, compared)
    assert compared.first_difference is None
    assert abs(compared.peak_ratio - 1) <= 0.03, compared


@on_ranks(2)
@pytest.mark.parametrize("options", mostly_slow(TWO_RANKS, TWO_RANKS[0]), ids=str)
def test_plans_for_two_ranks(options, planned):
    check(planned, partial(make_job, **options))


@on_ranks(2)
@pytest.mark.parametrize("name", mostly_slow(families.FAMILIES, "unet", "lstm"))
def test_plans_for_families_of_models(name, planned_families):
    check(planned_families, partial(families.make_job, name))


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("options", FOUR_RANKS, ids=str)
def test_plans_for_four_ranks(options, planned):
    check(planned, partial(make_job, **options))
