"""Planned times are held against runs in virtual time, and what a profile is made of."""

import dataclasses
import functools
import itertools
import math
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, GradientSync, MixedPrecisionPolicy
from meshard.planning import (
    Collective,
    KindTime,
    Link,
    MeasuredWork,
    Profile,
    StepTime,
    measure,
    plan,
)
from meshard.planning.measuring import _Measured, _profile_of
from meshard.timeline import KindSummary, Summary
from tests.benchmarks.pretend_network import Network
from tests.support import insides
from tests.support.fake_device import FakeDevice
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.spread import mostly_slow
from tests.support.virtual_time import virtual_machine

RANKS, WIDTH = 8, 128
SECONDS_PER_BYTE = 1e-6
FAST, SLOW = Network(1e9, 1e9, 0.0), Network(60e3, 60e3, 0.0)
FAR = Network(60e3, 60e3, 0.01)  # with latency


@pytest.fixture(autouse=True)
def through_sockets(monkeypatch):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", "0")


def plain(model, cls, **options):
    return cls(model.parameters(), **options)


def make_job(
    depth=4,
    *,
    reshard=True,
    shape=(RANKS,),
    batch=64,
    microbatches=1,
    mode="FULL",
    in_backward=False,
    local=False,
    options=None,
    recompute=False,
    clips=False,
):
    mesh = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    # Not all layers have the same size, so that latency can be told from bandwidth.
    widths = [WIDTH * (1 + number % 2) for number in range(depth + 1)]
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(wide, WIDTH), nn.Tanh(), nn.Linear(WIDTH, after))
            for wide, after in itertools.pairwise(widths)
        )
    )
    for layer in model:
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        meshard.fully_shard(layer, mesh, reshard_after_forward=reshard)
    meshard.fully_shard(model, mesh)
    make = meshard.overlap_optimizer if in_backward else meshard.local_optimizer if local else plain
    optimizer = make(model, torch.optim.AdamW, lr=1e-3, **options or {})
    batches = [torch.ones(batch, WIDTH) for _ in range(microbatches)]

    def step():
        for x in meshard.microbatches(model, batches, until_last=GradientSync[mode]):
            model(x).sum().backward()
        if clips:
            meshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def profile_on(network, **settings):
    with virtual_machine(RANKS, network, SECONDS_PER_BYTE):
        return measure(make_job(**settings), steps=3)


usual_profile = functools.cache(profile_on)  # of the usual settings, for tests of other things


def seconds_on(network, **settings):
    with virtual_machine(RANKS, network, SECONDS_PER_BYTE) as clock:
        step = make_job(**settings)
        for _ in range(3):
            before = clock.now
            step()
        return clock.now - before


def planned_time(profile, **settings):
    job = partial(make_job, **settings)
    return plan(job, world_size=RANKS, device_type="cpu", profile=profile, steps=3).time


def make_layers(depth):
    """Return a step of equal layers, which compute much more than they copy."""
    layers = (meshard.fully_shard(nn.Linear(512, 512, bias=False)) for _ in range(depth))
    model = meshard.fully_shard(nn.Sequential(*layers))
    x = torch.ones(2**16, 512, requires_grad=True)

    def step():
        model(x).sum().backward()
        model.zero_grad()
        x.grad = None

    return step


SETTINGS = [
    {},
    {"reshard": False},
    {"depth": 7},
    {"batch": 16},
    {"shape": (2, 4)},
    {"microbatches": 3},
    {"shape": (2, 4), "microbatches": 3, "mode": "REDUCE_SCATTER"},
    {"reshard": 2},
    {"local": True},
    {"in_backward": True},
    {"in_backward": True, "options": {"wait": "gather"}},
    {"in_backward": True, "options": {"max_unit_norm": 1.0}},
    {"recompute": True},
    {"clips": True},
]


@pytest.mark.parametrize("settings", mostly_slow(SETTINGS, {"shape": (2, 4)}), ids=str)
def test_a_profile_of_one_setting_tells_the_time_of_another(settings):
    planned = planned_time(usual_profile(SLOW), **settings)
    assert planned.seconds == pytest.approx(seconds_on(SLOW, **settings), rel=1e-6)
    assert planned.high - planned.low < 1e-6 * planned.seconds  # no step was slower than another
    assert planned.compute + planned.exposed == pytest.approx(planned.seconds)
    assert sum(planned.phases.values()) == pytest.approx(planned.compute)


def test_latency_and_bandwidth_are_found_apart():
    profile = usual_profile(FAR)
    assert profile.within_node.bytes_per_second == pytest.approx(60e3)
    assert profile.within_node.latency == pytest.approx(0.01 * math.log2(RANKS) / (RANKS - 1))
    assert profile.within_node.spread == pytest.approx(0.0, abs=1e-6)
    assert planned_time(profile, depth=7).seconds == pytest.approx(seconds_on(FAR, depth=7))


@pytest.mark.parametrize(
    "settings", [{}, {"in_backward": True, "options": {"max_unit_norm": 1.0}}], ids=str
)
def test_a_network_may_be_stated(settings):
    fast, slow = profile_on(FAST, **settings), profile_on(SLOW, **settings)
    for profile, network in ((slow, FAST), (fast, SLOW)):
        stated = dataclasses.replace(profile, within_node=Link(network.inside))
        planned = planned_time(stated, **settings)
        assert planned.seconds == pytest.approx(seconds_on(network, **settings), rel=1e-3)


def test_a_plan_is_held_against_a_trace_phase_by_phase(tmp_path):
    profile = usual_profile(SLOW)
    job = partial(plan, make_job, world_size=RANKS, device_type="cpu", steps=3)
    with virtual_machine(RANKS, SLOW, SECONDS_PER_BYTE):
        step = make_job()
        step()
        with meshard.trace(tmp_path / "trace.json") as traced, meshard.CommLedger() as ledger:
            step()
    compared = job(profile=profile).compare(ledger, summary=traced.summary)
    assert compared.first_difference is None
    assert {"forward", "backward", "optimizer", "exposed all_gather"} <= set(compared.seconds)
    for name, (planned, ran) in compared.seconds.items():
        assert planned == pytest.approx(ran, rel=1e-6), name
    assert "backward: planned" in str(compared)
    with pytest.raises(ValueError, match="no time"):
        job().compare(ledger, summary=traced.summary)


def test_collectives_without_a_lane_are_compared_together():
    kinds = {"gather": KindTime(3.0, 1.0), "scatter": KindTime(4.0, 2.0)}
    time = StepTime(9.0, 9.0, 9.0, 6.0, {}, kinds, 2.0, "scatter 0")
    ran = KindSummary(
        num_collectives=2, num_bytes=2, seconds=7.0, exposed=4.0, longest_wait=3.0, longest_unit="0"
    )
    summary = Summary(
        rank=0,
        seconds=9.0,
        kinds={"other collectives": ran},
        phases={},
        peak_bytes=None,
        memory_kind="",
    )
    planned = plan(make_job, world_size=RANKS, device_type="cpu")
    compared = dataclasses.replace(planned, time=time).compare(
        meshard.CommLedger(), summary=summary
    )
    assert compared.seconds == {"exposed other collectives": (3.0, 4.0)}


def test_the_band_is_as_wide_as_measured_steps_were_apart():
    profile = usual_profile(FAST)
    median = profile.steps[0]
    profile = dataclasses.replace(profile, steps=[0.9 * median, median, 1.05 * median])
    planned = planned_time(profile)
    assert planned.low / planned.seconds == pytest.approx(0.9, rel=1e-3)
    assert planned.high / planned.seconds == pytest.approx(1.1, rel=1e-3)


def test_the_band_holds_the_network_too():
    profile = usual_profile(SLOW)
    link = dataclasses.replace(profile.within_node, spread=0.5)
    planned = planned_time(dataclasses.replace(profile, within_node=link))
    assert planned.low < 0.99 * planned.seconds
    assert planned.high > 1.01 * planned.seconds


def test_a_collective_takes_its_hops_and_its_bytes():
    link = Link(bytes_per_second=100.0, latency=2.0)
    gather = Collective("all_gather", "", 4, 800, 600, False)
    assert link.seconds(gather) == 3 * 2 + 6
    assert link.seconds(dataclasses.replace(gather, op="all_reduce")) == 2 * 3 * 2 + 6


@pytest.mark.parametrize("make", [plain, meshard.overlap_optimizer])
def test_what_runs_beside_compute_on_a_device_is_no_compute(make):
    def job():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # casts on the comm streams
        model = meshard.fully_shard(nn.Linear(1024, 1024), mp_policy=policy)
        optimizer = make(model, torch.optim.AdamW)

        def step():
            model(torch.ones(4, 1024)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    profile = Profile([MeasuredWork("forward", "", 1.0, 1e9)], Link(1e12))
    found = plan(job, world_size=2, profile=profile, steps=3).time
    in_phases = sum(found.phases.values())
    beside = 0.0 if make is plain else found.phases["optimizer"]
    assert in_phases == pytest.approx(found.compute + beside)


def test_units_that_were_not_measured_are_as_fast_as_their_family_or_phase():
    work = [
        MeasuredWork("forward", "layers.0", 2.0, 1.0),
        MeasuredWork("forward", "head", 6.0, 1.0),
        MeasuredWork("backward", "head", 10.0, 2.0),
    ]
    rate = Profile(work).rates()
    assert rate(("forward", "layers.31")) == 2.0
    assert rate(("forward", "embedding")) == 4.0
    assert rate(("recompute", "head")) == 4.5
    assert Profile([]).rates()(("forward", "head")) == 0.0


def test_profiles_are_files(tmp_path):
    profile = usual_profile(FAST)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no file"):
        Profile.load(tmp_path / "other.json")


def test_a_network_that_was_not_measured_is_named():
    profile = usual_profile(FAST)
    with pytest.raises(ValueError, match="no between_nodes"):
        plan(make_job, world_size=RANKS, ranks_per_node=4, device_type="cpu", profile=profile)


def test_a_step_without_units_is_refused():
    with pytest.raises(RuntimeError, match="fully_shard or replicate"):
        measure(lambda: nn.Linear(2, 2)(torch.ones(1, 2)))


def test_streams_run_beside_each_other():
    """Worked out by hand: collectives of 1 s, and compute of 2 s (forward) and 4 s (backward)."""
    job = partial(plan, partial(make_layers, depth=4), world_size=2, steps=4)
    phases = {"forward": 2.0, "backward": 4.0}
    as_bytes = [MeasuredWork(phase, "", 1.0, 1.0) for phase in phases]
    planned = job(profile=Profile(as_bytes, Link(1.0)))
    work = [
        MeasuredWork("", "", 0.0, 1.0),  # the sum takes no time
        *(
            MeasuredWork(phase, "", 4 * seconds, planned.time.phases[phase])
            for phase, seconds in phases.items()
        ),
    ]
    gather = planned.events[0].wire_bytes
    fast = job(profile=Profile(work, Link(gather))).time
    # The first gather is exposed, that of the last layer at the begin of backward, and the last
    # reduction.
    assert fast.seconds == pytest.approx(1 + 4 * 2 + 1 + 4 * 4 + 1, rel=0.01)
    slow = job(profile=Profile(work, Link(gather / 3))).time
    # Now they take 3 s each. The second gather begins with the first, and ends 1 s after the first
    # forward; those after it begin with a forward, and end 1 s after that. Backward hides them.
    assert slow.seconds == pytest.approx(3 + 4 * 2 + 3 * 1 + 3 + 4 * 4 + 3, rel=0.01)
    assert slow.kinds["all_gather"].exposed == pytest.approx(3 + 3 * 1 + 3, rel=0.02)
    assert slow.kinds["reduce_scatter"].exposed == pytest.approx(3, rel=0.02)
    assert slow.kinds["all_gather"].seconds == pytest.approx(8 * 3)


@on_ranks(2)
def test_all_ranks_get_the_same_profile(tmp_path):
    model = meshard.fully_shard(nn.Linear(256, 256))
    rank = torch.distributed.get_rank()

    def step():
        time.sleep(0.1 * rank)  # the other rank waits in its gather, and in its reduce-scatter
        loss = model(torch.ones(8, 256)).sum()
        time.sleep(0.1 * rank)
        loss.backward()

    profile = measure(step, steps=4, path=tmp_path / f"of rank {rank}.json")
    torch.distributed.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["of rank 0.json"]
    assert Profile.load(tmp_path / "of rank 0.json") == profile
    assert profile.device_type == "cpu"
    gather = Collective("all_gather", "", 2, 2**18, 2**17, False)
    assert profile.within_node.seconds(gather) < 0.05
    assert len(profile.steps) == 4
    assert profile.within_node.bytes_per_second > 0
    assert profile.between_nodes is None
    assert {"forward", "backward"} <= {each.phase for each in profile.work}
    assert all(each.seconds >= 0 for each in profile.work)


@on_fake_ranks(2)
def test_a_device_that_torch_is_built_for_and_that_is_not_there_was_not_measured(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else cuda,
    )
    insides.use_streams(monkeypatch, FakeDevice())
    model = meshard.fully_shard(nn.Linear(64, 64))
    assert measure(lambda: model(torch.ones(8, 64)).sum().backward(), steps=1).device_type == ""


@on_fake_ranks(2)
def test_steps_in_host_memory_are_counted_for_their_units():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    for module in (*model, model):
        meshard.fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)

    def step():
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()

    found = measure(step, steps=1).work
    counted = {each.unit for each in found if each.phase == "optimizer" and each.work}
    assert counted == {"0", "1"}


def test_a_step_that_differs_each_time_is_refused():
    calls = []

    def step():
        calls.append(1)
        loss = model(torch.ones(8, 256)).sum()
        if len(calls) != 2:
            loss.backward()

    with virtual_machine(RANKS, FAST, SECONDS_PER_BYTE):
        model = meshard.fully_shard(nn.Linear(256, 256))
        with pytest.raises(RuntimeError, match="ran no kernel in backward"):
            measure(step, steps=2)


@on_ranks(2)
def test_all_ranks_refuse_a_step_that_differs_each_time_on_one_of_them():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "alone"))
    model, calls = meshard.fully_shard(nn.Linear(64, 64), mesh["alone"]), []

    def step():
        calls.append(1)
        loss = model(torch.ones(8, 64)).sum()
        if len(calls) != 2 or torch.distributed.get_rank() == 0:
            loss.backward()

    with pytest.raises(RuntimeError, match="ran no kernel in backward"):
        measure(step, steps=2)


def test_collectives_of_different_stages_are_not_taken_for_the_same():
    """Both ranks send a byte per second; the second stage is a hundred times as small."""
    ranks = []
    for stage, size in enumerate((2000, 20)):
        gather = Collective("all_gather", f"stages.{stage}", 2, size, size // 2, False)
        ranks.append(_Measured({}, {}, [(gather, size / 2)] * 5, [1.0]))
    assert _profile_of(ranks, "cpu").within_node.bytes_per_second == pytest.approx(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0.0),
        lambda: Link(math.nan),
        lambda: Link(1.0, latency=-1.0),
        lambda: MeasuredWork("forward", "", -1.0, 1.0),
        lambda: MeasuredWork("forward", "", math.nan, 1.0),
        lambda: plan(make_layers, world_size=2, profile=Profile([])),
    ],
    ids=["zero", "nan", "latency", "seconds", "nan seconds", "no work"],
)
def test_profiles_that_say_nothing_are_refused(make):
    with pytest.raises(ValueError, match=r"got|no work"):
        make()


def test_a_profile_of_another_type_of_device_is_refused():
    profile = Profile([MeasuredWork("forward", "", 1.0, 1e9)], Link(1e12), device_type="cpu")
    with pytest.raises(ValueError, match=r"measured on 'cpu', and the plan is for 'cuda'"):
        plan(make_layers, world_size=2, profile=profile)
