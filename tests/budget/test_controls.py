"""How many collectives each setter leaves in a step."""

import torch

import meshard
from meshard import CommLedger, GradientSync
from tests.api.test_controls import sharded
from tests.support.ranks import on_fake_ranks
from tests.support.spread import spread


def counts_of_a_step(model):
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6)).sum().backward()
    counts = ledger.counts
    return tuple(counts.get(op, 0) for op in ("all_gather", "reduce_scatter", "all_reduce"))


@on_fake_ranks(4)
def test_the_last_call_of_the_setters_counts():
    """Of boolean ones see also ``tests.peers.test_ours``."""
    model = sharded()
    for setter, value, expected in [
        ("set_requires_all_reduce", False, (7, 4, 0)),
        ("set_requires_gradient_sync", True, (7, 4, 4)),
        ("set_requires_gradient_sync", False, (7, 0, 0)),
        ("set_gradient_sync", GradientSync.REDUCE_SCATTER, (7, 4, 0)),
        ("set_requires_all_reduce", True, (7, 4, 4)),
    ]:
        getattr(model, setter)(value)
        assert counts_of_a_step(model) == expected


@spread(before=list(GradientSync), inside=[GradientSync.FULL, GradientSync.NONE])
@on_fake_ranks(4)
def test_gradient_sync_restores_the_mode_of_each_unit(before, inside):
    model = sharded()
    model.blocks[1].set_gradient_sync(before)
    expected = counts_of_a_step(model)
    with meshard.gradient_sync(model, inside):
        model.set_requires_all_reduce(False)
    assert counts_of_a_step(model) == expected


@on_fake_ranks(4)
def test_resharding_is_set_at_any_time():
    model = sharded()
    for setter, reshards, num_gathered in [
        ("set_reshard_after_forward", False, 4),
        ("set_reshard_after_forward", True, 8),
        ("set_reshard_after_backward", False, 8),
        ("set_reshard_after_forward", False, 0),
    ]:
        getattr(model, setter)(reshards)
        assert counts_of_a_step(model) == (num_gathered, 4, 4)


@on_fake_ranks(4)
def test_what_is_unsharded_by_hand_is_not_gathered_again():
    model = sharded()
    block = model.blocks[1]
    with CommLedger(model) as ledger:
        block.unshard(async_op=True).wait()
        block.unshard()
    assert ledger.counts == {"all_gather": 1}
    block.reshard()
    assert counts_of_a_step(model) == (7, 4, 4)
    model.blocks[0].unshard(async_op=True)  # saves the gather in forward
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6))
    assert [event.unit for event in ledger.events] == ["(root)", "blocks.1", "blocks.2"]
