"""Modes of single units, and windows that end without a backward of the unit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.models import Made, Tables, seeded
from tests.support.ranks import on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES


def make(mesh_shape):
    """Two units of one parameter, and a root with one."""
    mesh = init_device_mesh("cpu", mesh_shape)
    model = Tables([[(4,)], [(4,)], [(4,)]])
    for unit in model.units:
        meshard.fully_shard(unit, mesh)
    return meshard.fully_shard(model, mesh)


def run(model, modes, *values):
    """One mode and one gradient per unit, the root's last; a unit without one is not run."""
    for unit, mode in zip([*model.units, model], modes, strict=True):
        unit.set_gradient_sync(MODES[mode], recurse=False)
    model([None if value is None else [torch.full((4,), value)] for value in values]).backward()


def grads(model):
    params = [table.params[0] for table in (*model.units, model)]
    return [None if p.grad is None else p.grad.full_tensor()[0].item() for p in params]


@on_threads(4)
def test_units_in_different_modes_send_and_show_what_theirs_say():
    model = make((2, 2))
    for modes, number, expected in (
        ("NRF", 1.0, ([None, None, 1.0], ["", "s", "sa"], ["unsharded", 1.0])),
        ("RFN", 2.0, ([None, 3.0, 1.0], ["s", "sa", ""], [3.0, "-"])),
        ("FFF", 4.0, ([7.0, 7.0, 7.0], ["sa", "sa", "sa"], ["-", "-"])),
    ):
        with CommLedger(model) as ledger:
            run(model, modes, number, number, number)
        counts = {"units.0": "", "units.1": "", "(root)": ""}
        for event in ledger.events:
            if event.op != "all_gather":
                counts[event.unit] += {"reduce_scatter": "s", "all_reduce": "a"}[event.op]
        pending = meshard.pending_gradients(model)
        partials = [pending.get(f"units.{number}.params.0", "-") for number in range(2)]
        shown = [
            "unsharded" if p is None else p if p == "-" else p.to_local()[0].item()
            for p in partials
        ]
        assert (grads(model), list(counts.values()), shown) == expected, modes


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (1, 4), (4, 1)])
@spread(before=["N", "R", "RN", "NR"], end=["full", "finalize"])
@on_threads(4)
def test_a_unit_that_is_not_run_on_full_is_flushed_all_the_same(mesh_shape, before, end):
    model = make(mesh_shape)
    for mode in before:
        run(model, mode * 3, 1.0, 1.0, 1.0)
    if end == "full":
        run(model, "FFF", None, 4.0, 4.0)
    else:
        meshard.finalize_gradients(model)
    assert not meshard.pending_gradients(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # would refuse while a window is open
    num, last = float(len(before)), 4.0 * (end == "full")
    assert grads(model) == [num, num + last, num + last]
    model.zero_grad()
    run(model, "FFF", 8.0, None, 8.0)  # nothing of the first window is left
    assert grads(model) == [8.0, None, 8.0]


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


@on_threads(4)
@spread(mode=["N", "R"], mesh_shape=[(4,), (2, 2)])
def test_a_last_backward_in_which_no_unit_runs_reduces_all_the_same(mode, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    child = nn.Linear(4, 1, bias=False)  # the only unit with parameters, which need not run
    model = seeded(Made(lambda m, x, use: m.child(x) if use else x, child=child))
    meshard.fully_shard(model.child, mesh)
    meshard.fully_shard(model, mesh)
    model.set_gradient_sync(MODES[mode])
    model(torch.full((1, 4), float(dist.get_rank())), True).sum().backward()
    model.set_gradient_sync(MODES["F"])
    model(torch.ones(1, 4, requires_grad=True), False).sum().backward()
    assert not meshard.pending_gradients(model)
    assert model.child.weight.grad.full_tensor().tolist() == [[1.5] * 4]
