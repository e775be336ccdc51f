"""Counts and bytes of communication, against the mathematics."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.models import Made
from tests.support.ranks import fake_group, on_fake_ranks, on_ranks
from tests.support.sharding import padded, shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES

ROWS = 256  # divisible by every shard count used here: no padding
WIDTH = 4


def build(num_units, mesh, **kwargs):
    """Return a root with parameters of its own around equal blocks."""

    def forward(m, x):
        for block in m.blocks:
            x = block(x)[:, :WIDTH]
        return x @ m.own.t()

    blocks = [nn.Linear(WIDTH, ROWS, bias=False) for _ in range(num_units - 1)]
    own = nn.Parameter(torch.ones(2 * ROWS, WIDTH))
    model = Made(forward, own=own, blocks=nn.ModuleList(blocks))
    return shard_blocks(model, mesh, **kwargs)


def measure(mesh_shape, num_units, schedule, warm_up=1, **kwargs):
    """Return the ledger of one window, after ``warm_up`` steps and a forward without backward."""
    model = build(num_units, init_device_mesh("cpu", mesh_shape), **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, WIDTH)
    for window in range(warm_up + 1):
        model.zero_grad()
        with CommLedger(model) as ledger:
            for sync in schedule:
                model.set_gradient_sync(MODES[sync])
                model(x).sum().backward()
        if window < warm_up:
            model(x)
            optimizer.step()
    return ledger


def check(ledger, mesh_shape, num_units, schedule, reshards):
    """Compare counts, bytes of whole buffers, and bytes that a ring sends."""
    shards, replicas = mesh_shape[-1], mesh_shape[0] if len(mesh_shape) == 2 else 1
    row = ROWS * WIDTH * 4 // shards
    # With rows of 16 bytes in any dtype: gathered in float32, and 8 elements that are reduced.
    root, block = shards * padded(2 * row, 16), shards * padded(row, 16)
    # A count of 4 bytes tells whether the parameter was used.
    sent = padded(2 * row + 4, 32) + (num_units - 1) * padded(row + 4, 32)
    num_reduced = sum(sync != "N" for sync in schedule)
    counts, totals, ring = {}, {}, {}
    if shards > 1:
        gathers = 2 * num_units - 1 if reshards else num_units
        counts["all_gather"] = gathers * len(schedule)
        totals["all_gather"] = (root + (gathers - 1) * block) * len(schedule)
        counts["reduce_scatter"] = num_units * num_reduced
        totals["reduce_scatter"] = shards * sent * num_reduced
        ring["all_gather"] = ring["reduce_scatter"] = (shards - 1) / shards
    if replicas > 1:
        counts["all_reduce"] = num_units * schedule.count("F")
        all_reduced = sent if shards > 1 else (num_units + 1) * row + 4 * num_units
        totals["all_reduce"] = all_reduced * schedule.count("F")
        ring["all_reduce"] = 2 * (replicas - 1) / replicas
    assert ledger.counts == counts
    assert ledger.bytes == totals
    expected = sum(total * ring[op] for op, total in totals.items())
    assert expected - sum(counts.values()) <= ledger.wire_bytes <= expected  # each in whole bytes


@spread(
    mesh_shape=[(1,), (2,), (8,), (256,), (2, 2), (4, 64), (256, 1), (2, 2)],
    num_units=[1, 3, 8],
    schedule=["F", "NNF", "RRF", "FFF", "RRF"],
    reshards=[True, False],
)
def test_counts_and_bytes_are_exact(mesh_shape, num_units, schedule, reshards):
    kwargs = {"reshard_after_forward": None if reshards else False}
    with fake_group(math.prod(mesh_shape)):
        ledger = measure(mesh_shape, num_units, schedule, **kwargs)
    check(ledger, mesh_shape, num_units, schedule, reshards)


@pytest.mark.parametrize(("mesh_shape", "reshards"), [((4,), False), ((2, 2), True)])
@on_ranks(4)
def test_real_ranks_issue_the_same_in_the_same_order(mesh_shape, reshards):
    kwargs = {"reshard_after_forward": None if reshards else False}
    ledger = measure(mesh_shape, 3, "RNF", **kwargs)
    check(ledger, mesh_shape, 3, "RNF", reshards)
    events = [None] * 4
    dist.all_gather_object(events, ledger.events)
    assert all(theirs == ledger.events for theirs in events)  # bytes and dtypes included


@on_fake_ranks(4)
def test_a_frozen_parameter_is_not_reduced_but_once_if_something_of_it_is_pending():
    layer = meshard.fully_shard(nn.Linear(4, 8), init_device_mesh("cpu", (2, 2)))
    gathered, both, bias = (32 + 8) * 4, 2 * 24 * 4, 2 * 8 * 4  # reduced in rows of 8 elements
    for mode, is_frozen, scattered in [
        ("R", False, both),
        ("F", True, both),
        ("R", True, bias),
        ("F", True, bias),
        ("F", False, both),
    ]:
        layer.weight.requires_grad_(not is_frozen)
        layer.set_gradient_sync(MODES[mode])
        with CommLedger() as ledger:
            layer(torch.ones(1, 4)).sum().backward()
        reduced = {"all_reduce": scattered // 2} if mode == "F" else {}
        assert ledger.bytes == {"all_gather": gathered, "reduce_scatter": scattered, **reduced}


@on_fake_ranks(4)
def test_a_ledger_of_one_module_counts_what_blocks_in_its_groups():
    ours = meshard.fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2, 2)))
    elsewhere = meshard.fully_shard(nn.Linear(4, 4), DeviceMesh("cpu", [0, 2, 3]))
    for module in (ours, elsewhere):
        module(torch.ones(1, 4)).sum().backward()
    with CommLedger(ours) as ledger, CommLedger() as everything:
        for module in (ours, elsewhere):
            meshard.clip_grad_norm_(module, 1.0)
    assert [(e.op, e.unit, e.group_size) for e in ledger.events] == [("all_gather", "(norm)", 2)]
    assert len(everything.events) == 2


@on_fake_ranks(2)
def test_a_ledger_of_a_part_counts_its_own_units():
    model = build(4, init_device_mesh("cpu", (2,)))
    parts = (model, model.blocks[1], model.blocks[:2])
    whole, of_one, of_two = (CommLedger(part) for part in parts)
    with whole, of_one, of_two, CommLedger() as everything:
        model(torch.ones(1, WIDTH)).sum().backward()
        with meshard.unsharded_params(model):
            pass
        meshard.clip_grad_norm_(model, 1.0)
    assert whole.events == everything.events
    assert [(event.op, event.unit) for event in of_one.events] == [
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.1"),
        ("reduce_scatter", "blocks.1"),
        ("all_gather", "blocks.1"),
        ("all_reduce", "(unsharded_params)"),
        ("all_gather", "(norm)"),
    ]
    beside = ("(root)", "blocks.2")
    assert of_two.events == [event for event in everything.events if event.unit not in beside]


@on_fake_ranks(2)
def test_a_ledger_tells_roots_apart_that_share_streams():
    mesh = init_device_mesh("cpu", (2,))
    stages = [build(2, mesh) for _ in range(2)]
    meshard.share_comm_ctx(stages)
    with CommLedger(stages[0]) as first, CommLedger(stages[1]) as second:
        stages[0](torch.ones(1, WIDTH))
    stages[0](torch.ones(1, WIDTH))
    with CommLedger(nn.ModuleList([stages[0], stages[1].blocks[0]])) as mixed:
        for stage in stages:
            stage(torch.ones(1, WIDTH))
    assert first.counts == {"all_gather": 2}
    assert second.counts == {}
    assert [event.unit for event in mixed.events] == ["(root)", "blocks.0", "blocks.0"]


@on_fake_ranks(2)
def test_a_ledger_may_be_made_before_a_new_root_is_put_around_its_module():
    layers = [meshard.fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    ledger = CommLedger(layers[0])
    model = meshard.fully_shard(nn.Sequential(*layers))
    with ledger:
        model(torch.ones(1, 4))
    assert [(event.op, event.unit) for event in ledger.events] == [("all_gather", "0")]


@on_fake_ranks(4)
def test_a_ledger_prints_a_table():
    model = build(2, init_device_mesh("cpu", (4,)), reshard_after_forward=True)
    with CommLedger() as ledger:
        model(torch.ones(1, WIDTH)).sum().backward()
    assert str(ledger).splitlines() == [
        "collective      unit      count   payload      sent",
        "all_gather      (root)        2  16.0 KiB  12.0 KiB",
        "all_gather      blocks.0      2    8192 B    6144 B",
        "reduce_scatter  (root)        1    8320 B    6240 B",
        "reduce_scatter  blocks.0      1    4224 B    3168 B",
        "total                         6  36.2 KiB  27.2 KiB",
    ]
    assert str(CommLedger()).splitlines()[1:] == ["total                 0      0 B   0 B"]
