"""Why a unit is unsharded, at each moment of a step: three tables, and the programs behind them.

A model runs three units, ``first``, ``unit`` and ``last``, and the tables are about ``unit``. A
cell has its leases, and its state if it is not the usual one: a unit with leases is *installed*
(its modules hold unsharded parameters), and one without is *sharded*. In every other state its
modules hold shards. An empty cell: that moment does not come. ``raf`` is ``reshard_after_forward``,
``rab`` is ``reshard_after_backward`` and ``uib`` is ``unshard_in_backward``.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from tests.support import insides
from tests.support.models import seeded
from tests.support.ranks import on_fake_ranks

FORWARD = """
|                                  | first runs      | unit runs | last runs       | it ended       |
| -------------------------------- | --------------- | --------- | --------------- | -------------- |
| the first forward                | -               | RUNS      | -               | -              |
| its order is known               | AHEAD gathering | RUNS      | -               | -              |
| unit is expected, but not run    | AHEAD gathering |           | AHEAD gathering | -              |
| raf=False                        | -               | RUNS      | RUNS            | KEPT           |
| no_grad                          | -               | RUNS      | -               | -              |
| no_grad, raf=False               | -               | RUNS      | RUNS            | unsharded      |
| hidden output                    | -               | RUNS      | HIDDEN sharded  | HIDDEN sharded |
| last raises, raf=False           | -               | RUNS      | RUNS            | -              |
| after unshard()                  | USER            | RUNS      | -               | -              |
| after unshard(), raf=False       | USER            | RUNS USER | RUNS USER       | KEPT USER      |
| after unshard(async_op=True)     | USER gathering  | RUNS      | -               | -              |
| after a backward, rab=False      | unsharded       | RUNS      | -               | -              |
| after forward, step(); raf=False | AHEAD gathering | RUNS      | RUNS            | KEPT           |
"""

BACKWARD = """
|                            | last's                 | unit's                 | first's         | it ended        |
| -------------------------- | ---------------------- | ---------------------- | --------------- | --------------- |
| raf=True                   | AHEAD gathering        | BACKWARD               | -               | -               |
| raf=False                  | KEPT                   | BACKWARD KEPT          | -               | -               |
| rab=False                  | AHEAD gathering        | BACKWARD               | unsharded       | unsharded       |
| raf=False, rab=False       | KEPT                   | BACKWARD KEPT          | unsharded       | unsharded       |
| hidden output              | HIDDEN AHEAD gathering | HIDDEN AHEAD gathering | -               | -               |
| unit is left out           | AHEAD gathering        |                        | -               | -               |
| retain_graph               | AHEAD gathering        | BACKWARD               | -               | -               |
| create_graph               | AHEAD gathering        | BACKWARD               | GRAPH unsharded | GRAPH unsharded |
| two open passes            | AHEAD gathering        | BACKWARD               | -               | -               |
| two open passes, raf=False | KEPT                   | BACKWARD KEPT          | KEPT unsharded  | KEPT unsharded  |
| unshard()                  | USER                   | BACKWARD USER          | -               | -               |
| unshard(), rab=False       | USER                   | BACKWARD USER          | USER            | USER            |
| first raises               | AHEAD gathering        | BACKWARD               | -               | -               |
| raf=False, uib=False       | KEPT                   | KEPT                   | -               | -               |
"""

CALLS = """
|                                                   | then            |
| ------------------------------------------------- | --------------- |
| unshard()                                         | USER            |
| unshard(async_op=True)                            | USER gathering  |
| unshard(async_op=True), wait()                    | USER            |
| unshard(async_op=True), reshard(), wait()         | -               |
| unshard(), reshard()                              | -               |
| forward with raf=False, reshard()                 | -               |
| unshard(), step()                                 | USER            |
| forward with raf=False, step()                    | KEPT unsharded  |
| forward with raf=False, state_dict()              | KEPT unsharded  |
| forward with raf=False, reset_iter_state()        | -               |
| unshard(), reset_iter_state()                     | -               |
| backward in which unit raises                     | BACKWARD        |
| backward in which unit raises, reset_iter_state() | -               |
| create_graph                                      | GRAPH unsharded |
| create_graph, backward through that graph         | -               |
"""


def rows(table):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().split("\n")]
    return {name: dict(zip(lines[0][1:], cells, strict=True)) for name, *cells in lines[2:]}


class Box:
    """An output in which no tensor is found."""

    def __init__(self, tensor):
        self.tensor = tensor


class Layer(nn.Module):
    """A unit that tells when it runs, and when its backward does."""

    def __init__(self, name, look):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.name, self.look = name, look
        self.hides, self.raises = False, ""

    def report(self, moment, *_):
        self.look(moment)
        if self.raises and moment.endswith(self.raises):
            raise ZeroDivisionError

    def forward(self, x):
        self.report(f"{self.name} runs")
        x = self.linear(x.tensor if isinstance(x, Box) else x)
        if x.requires_grad:
            x.register_hook(functools.partial(self.report, f"{self.name}'s"))
        return Box(torch.tanh(x)) if self.hides else torch.tanh(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unit, self.last = (Layer(n, self.look) for n in ("first", "unit", "last"))
        self.skips = self.cuts = False
        self.seen = {}

    def look(self, moment):
        held, state = insides.leases(self.unit)
        weight = self.unit._modules["linear"]._parameters["weight"]
        assert isinstance(weight, DTensor) == (state != "installed")
        usual = "installed" if held else "sharded"
        self.seen[moment] = " ".join([held] * bool(held) + [state] * (state != usual)) or "-"

    def forward(self, x):
        x = self.first(x)
        y = x if self.skips else self.unit(x)
        return self.last(y.detach()) + x if self.cuts else self.last(y)


def made():
    model = seeded(Model())
    for layer in (model.first, model.unit, model.last):
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model


def forward(model):
    try:
        return model(torch.ones(2, 4)).sum()
    finally:
        model.look("it ended")


def backward(model, loss, **kwargs):
    try:
        loss.backward(**kwargs)
    finally:
        model.look("it ended")


def set_up(model, row):
    if "raf=False" in row:
        model.unit.set_reshard_after_forward(False)
    if "rab=False" in row:
        model.unit.set_reshard_after_backward(False)
    if "uib=False" in row:
        model.unit.set_unshard_in_backward(False)
    model.unit.hides = "hidden" in row
    model.cuts = "left out" in row


def check(model, cells):
    assert {moment: model.seen.get(moment, "") for moment in cells} == cells


@pytest.mark.parametrize("row", rows(FORWARD))
@pytest.mark.filterwarnings("ignore:unit .* returned a Box")
@on_fake_ranks(1)
def test_forward(row):
    model = made()
    set_up(model, row)
    if row in (
        "its order is known",
        "unit is expected, but not run",
        "after a backward, rab=False",
    ):
        backward(model, forward(model))
    if "step()" in row:
        forward(model)  # no backward comes
        model.optimizer.step()
    if "unshard(" in row:
        model.unit.unshard(async_op="async_op=True" in row)
    model.skips = "not run" in row
    model.last.raises = "runs" if "raises" in row else ""
    model.seen.clear()
    with torch.set_grad_enabled("no_grad" not in row), contextlib.suppress(ZeroDivisionError):
        forward(model)
    check(model, rows(FORWARD)[row])


@pytest.mark.parametrize("row", rows(BACKWARD))
@pytest.mark.filterwarnings("ignore:unit .* returned a Box")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@on_fake_ranks(1)
def test_backward(row):
    model = made()
    set_up(model, row)
    losses = [forward(model) for _ in range(1 + ("two open" in row))]
    if "unshard()" in row:
        model.unit.unshard()
    model.first.raises = "'s" if "raises" in row else ""
    flags = {flag: True for flag in ("retain_graph", "create_graph") if flag in row}
    model.seen.clear()
    with contextlib.suppress(ZeroDivisionError):
        backward(model, losses[-1], **flags)
    check(model, rows(BACKWARD)[row])


def run(model, step, handles):
    """Do one of the steps that a row of ``CALLS`` is made of."""
    match step:
        case "unshard()":
            model.unit.unshard()
        case "unshard(async_op=True)":
            handles.append(model.unit.unshard(async_op=True))
        case "wait()":
            handles.pop().wait()
        case "reshard()":
            model.unit.reshard()
        case "step()":
            model.optimizer.step()
        case "state_dict()":
            model.state_dict()
        case "reset_iter_state()":
            model.reset_iter_state()
        case "forward with raf=False":
            model.unit.set_reshard_after_forward(False)
            forward(model)
        case "backward in which unit raises":
            model.unit.raises = "'s"
            with pytest.raises(ZeroDivisionError):
                backward(model, forward(model))
        case "create_graph":
            x = torch.ones(2, 4, requires_grad=True)
            handles += torch.autograd.grad(model(x).sum(), x, create_graph=True)
        case "backward through that graph":
            handles.pop().square().sum().backward()
        case _:
            raise NotImplementedError(step)


@pytest.mark.parametrize("row", rows(CALLS))
@on_fake_ranks(1)
def test_calls(row):
    model, handles = made(), []
    for step in row.split(", "):
        run(model, step, handles)
    model.look("then")
    check(model, rows(CALLS)[row])
