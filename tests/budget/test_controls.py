"""How many collectives each setter leaves in a step."""

import meshard
from meshard import GradientSync
from tests.api.test_controls import counts_of_a_step, sharded
from tests.support.ranks import on_fake_ranks
from tests.support.spread import spread


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
