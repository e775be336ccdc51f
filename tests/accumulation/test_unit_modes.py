"""Modes of single units, and windows that end without a backward of the unit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.models import Made, Tables, seeded
from tests.support.spread import spread
from tests.support.strategies import MODES
from tests.support.threads import run_threads


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


def modes_side_by_side():
    model = make((2, 2))
    found = []
    for modes, number in (("NRF", 1.0), ("RFN", 2.0), ("FFF", 4.0)):
        with CommLedger(model) as ledger:
            run(model, modes, number, number, number)
        counts = {"units.0": "", "units.1": "", "(root)": ""}
        for event in ledger.events:
            if event.op != "all_gather":
                counts[event.unit] += {"reduce_scatter": "s", "all_reduce": "a"}[event.op]
        pending = meshard.pending_gradients(model)
        states = [pending.get(name, "-") for name in ("units.0.params.0", "units.1.params.0")]
        held = ["whole" if s is None else s if s == "-" else s.to_local()[0].item() for s in states]
        found.append((grads(model), list(counts.values()), held))
    return found


def test_units_in_different_modes_send_and_show_what_theirs_say():
    expected = [
        ([None, None, 1.0], ["", "s", "sa"], ["whole", 1.0]),
        ([None, 3.0, 1.0], ["s", "sa", ""], [3.0, "-"]),
        ([7.0, 7.0, 7.0], ["sa", "sa", "sa"], ["-", "-"]),
    ]
    assert run_threads(modes_side_by_side, 4) == [expected] * 4


def skip_a_unit(mesh_shape, before, end):
    model = make(mesh_shape)
    for mode in before:
        run(model, mode * 3, 1.0, 1.0, 1.0)
    if end == "full":
        run(model, "FFF", None, 4.0, 4.0)
    else:
        meshard.finalize_gradients(model)
    assert not meshard.pending_gradients(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # would refuse while a window is open
    first = grads(model)
    model.zero_grad()
    run(model, "FFF", 8.0, None, 8.0)  # nothing of the first window is left
    return first, grads(model)


@spread(
    mesh_shape=[(4,), (2, 2), (1, 2), (2, 1)],
    before=["N", "R", "RN", "NR"],
    end=["full", "finalize"],
)
def test_a_unit_that_is_not_run_on_full_is_flushed_all_the_same(mesh_shape, before, end):
    num, last = float(len(before)), 4.0 * (end == "full")
    expected = ([num, num + last, num + last], [8.0, None, 8.0])
    num_ranks = torch.Size(mesh_shape).numel()
    assert run_threads(skip_a_unit, num_ranks, mesh_shape, before, end) == [expected] * num_ranks


def flush_in_order():
    def forward(module, x, count):
        for layer in module.layers[:count]:
            x = layer(x)
        return x

    model = seeded(Made(forward, layers=[nn.Linear(2, 2, bias=False) for _ in range(3)]))
    mesh = init_device_mesh("cpu", (2, 2))
    for layer in model.layers:
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    x = torch.ones(1, 2)
    with meshard.no_sync(model):
        model(x, 3).sum().backward()
    with CommLedger(model) as ledger:
        model(x, 1).sum().backward()
    return [(event.op, event.unit) for event in ledger.events if event.op != "all_gather"]


def test_units_that_are_flushed_come_after_those_that_ran_in_the_order_of_backward():
    units = ["layers.0", "layers.2", "layers.1"]
    for events in run_threads(flush_in_order, 4):
        assert [unit for op, unit in events if op == "reduce_scatter"] == units
        assert sorted(events) == sorted(
            (op, unit) for unit in units for op in ("reduce_scatter", "all_reduce")
        )


def end_without_any_unit(mode, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    child = nn.Linear(4, 1, bias=False)  # the only unit with parameters, which need not run
    model = seeded(Made(lambda m, x, use: m.child(x) if use else x, child=child))
    meshard.fully_shard(model.child, mesh)
    meshard.fully_shard(model, mesh)
    model.set_gradient_sync(MODES[mode])
    model(torch.full((1, 4), float(dist.get_rank())), True).sum().backward()
    model.set_gradient_sync(MODES["F"])
    model(torch.ones(1, 4, requires_grad=True), False).sum().backward()
    return bool(meshard.pending_gradients(model)), model.child.weight.grad.full_tensor().tolist()


@spread(mode=["N", "R"], mesh_shape=[(4,), (2, 2)])
def test_a_last_backward_in_which_no_unit_runs_reduces_all_the_same(mode, mesh_shape):
    found = run_threads(end_without_any_unit, 4, mode, mesh_shape)
    assert found == [(False, [[1.5] * 4])] * 4
