"""What windows of microbatches reduce, and in which order."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.models import Made, Tables, seeded
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks


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
