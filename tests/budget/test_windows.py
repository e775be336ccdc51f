"""What windows of microbatches reduce, and in which order."""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.gradients.test_any_window import Param, Window, run_window, windows
from tests.gradients.test_divergent_order import choice, patterns
from tests.support.models import Made, Tables, seeded
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import padded, shard_blocks
from tests.support.threads import run_threads


@on_threads(4)
def test_units_that_are_flushed_come_after_those_that_ran_in_the_order_of_backward():
    def forward(module, x, count):
        for layer in module.blocks[:count]:
            x = layer(x)
        return x

    model = seeded(Made(forward, blocks=[nn.Linear(2, 2, bias=False) for _ in range(3)]))
    shard_blocks(model, init_device_mesh("cpu", (2, 2)))
    x = torch.ones(1, 2)
    with meshard.no_sync(model):
        model(x, 3).sum().backward()
    with CommLedger(model) as ledger:
        model(x, 1).sum().backward()
    events = [(event.op, event.unit) for event in ledger.events if event.op != "all_gather"]
    units = ["blocks.0", "blocks.2", "blocks.1"]
    assert [unit for op, unit in events if op == "reduce_scatter"] == units
    assert sorted(unit for op, unit in events if op == "all_reduce") == sorted(units)
    assert len(events) == 6


@on_ranks(2)
def test_a_unit_that_has_not_run_is_left_to_finalization():
    shapes = [[(5,)], [(4,)], [(3,)]]
    model, gradients = Tables(shapes), [[torch.ones(shape)] for (shape,) in shapes]
    for module in (*model.units, model):
        meshard.fully_shard(module)
    model.set_manual_backward_finalization(True)
    with meshard.no_sync(model):
        model(gradients).backward()
    with CommLedger(model) as in_backward:
        model([None, *gradients[1:]]).backward()
    with CommLedger(model) as finally_:
        model.finalize_backward()
    reduced = [
        [each.unit for each in ledger.events if each.op == "reduce_scatter"]
        for ledger in (in_backward, finally_)
    ]
    assert reduced == [["units.1", "(root)"], ["units.0"]]
    assert model.units[0].params[0].grad.full_tensor().tolist() == [1.0] * 5


def expected_reductions(window: Window, unit: int) -> Counter[tuple[str, int, torch.dtype]]:
    """Return what a unit must send to reduce its gradients, whoever uses what of it.

    A unit that is not run holds its peace, except that F flushes what it has accumulated.
    """
    counted: Counter[tuple[str, int, torch.dtype]] = Counter()
    if not window.trains(unit):
        return counted
    slots = [p.slot_numel(window.shards) for p in window.params[unit] if not p.is_frozen]
    numel = sum(slots) + len(slots)  # a count for each is behind the gradients
    row = padded(numel, 8) if window.shards > 1 else numel
    dtype = window.wire_dtype(unit)
    is_pending = False
    for k, modes in enumerate(window.modes):
        is_run = window.uses[k][0][unit] is not None
        mode = "F" if modes[unit] == "R" and len(window.mesh) == 1 else modes[unit]
        if (is_run and mode != "N") or (is_pending and modes[unit] == "F"):
            if window.shards > 1:
                payload = window.shards * row * dtype.itemsize
                counted["reduce_scatter", payload, dtype] += 1
            if mode == "F" and window.replicas > 1:
                counted["all_reduce", row * dtype.itemsize, dtype] += 1
            is_pending = mode != "F"
        else:
            is_pending = is_pending or is_run
    return counted


@given(window=windows())
@example(  # few that are drawn have several shards and several replicas
    window=Window(
        mesh=(2, 2),
        params=[
            [Param(shape=(3,), dtype=torch.bfloat16), Param(shape=(5, 3))],
            [Param(shape=(2,))],
        ],
        modes=["RN", "NR", "FF"],
        uses=[[[[True, True], [True]]] * 4] * 3,
        factor=4.0,
    )
)
def test_any_window_sends_each_gradient_once(window):
    ranks = math.prod(window.mesh)
    (_, events), *_ = run_threads(run_window, ranks, window)
    for u, label in enumerate([*(f"units.{u}" for u in range(len(window.params) - 1)), "(root)"]):
        sent = [event for event in events if event.unit == label]
        reductions = [event for event in sent if event.op != "all_gather"]
        counted = Counter((event.op, event.payload_bytes, event.dtype) for event in reductions)
        assert counted == expected_reductions(window, u), label


@pytest.mark.parametrize("pattern", list(patterns()))
@on_threads(2)
def test_two_forwards_and_one_backward_reduce_each_unit_once(pattern):
    def forward(module, uses):
        x = module.own.sum()
        for unit, use in zip(module.blocks, uses, strict=True):
            x = unit(x, use)
        return x

    model = Made(forward, own=nn.Parameter(torch.zeros(4)), blocks=[choice(), choice()])
    shard_blocks(model)
    with meshard.CommLedger(model) as ledger:
        first, second = pattern[dist.get_rank()]
        (model(first) + model(second)).backward()
    assert ledger.counts["reduce_scatter"] == 3
