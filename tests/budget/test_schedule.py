"""Which units are gathered next or not at all, and what a backward costs."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshard
from meshard import CommLedger
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import Made, MlpBlock, MlpStack, seeded
from tests.support.ranks import fake_group, on_fake_ranks, on_threads
from tests.support.sharding import shard_blocks

X = torch.ones(1, 4)


def make():
    """Return a model that runs its blocks in the order that it is told."""
    return shard_blocks(
        Made(
            lambda m, x, order: functools.reduce(lambda x, n: m.blocks[n](x), order, x) * m.scale,
            blocks=[MlpBlock(4, 4) for _ in range(5)],
            scale=nn.Parameter(torch.ones(1)),
        )
    )


def gathered_ahead(model, order):
    """Run a forward; return which other block has been gathered last as each block begins."""
    found = []

    def look(number):
        last = ledger.events[-1].unit
        found.append(None if last == f"blocks.{number}" else int(last[-1]))

    hooks = [
        block.up.register_forward_pre_hook(lambda *_, number=number: look(number))
        for number, block in enumerate(model.blocks)
    ]
    with CommLedger(model) as ledger, torch.no_grad():
        model(X, order)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([[0, 1, 2]] * 2 + [[0, 2]], [1, None]),
        ([[0, 1, 2], [0, 3], [0, 1, 2]], [3, 2, None]),
    ],
    ids=["one is left out", "another between"],
)
@on_fake_ranks(2)
def test_a_forward_follows_the_last_one_that_began_alike(orders, expected):
    model = make()
    assert [gathered_ahead(model, order) for order in orders][-1] == expected


@on_fake_ranks(2)
def test_parts_that_are_called_in_turn_are_predicted_each_by_itself():
    model = make()
    for _ in range(2):
        model.blocks[0](X)
        found = gathered_ahead(model, [0, 1])
    assert found == [1, None]


@given(orders=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8), min_size=2, max_size=4))
def test_any_order_repeated_once_is_predicted_in_full(orders):
    with fake_group(2):
        model = make()
        for order in [*orders, orders[-1]]:
            found = gathered_ahead(model, order)
    following = [*orders[-1][1:], None]
    assert found == [
        None if then == now else then for now, then in zip(orders[-1], following, strict=True)
    ]


@on_fake_ranks(2)
def test_an_interrupted_forward_leaves_the_prediction_as_it_was():
    def stop(*_):
        raise KeyboardInterrupt

    model = make()
    gathered_ahead(model, [0, 1, 2])
    hook = model.blocks[3].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(X, [0, 3])
    hook.remove()
    assert gathered_ahead(model, [0, 1, 2]) == [1, 2, None]


@on_fake_ranks(2)
def test_a_backward_follows_the_exits_of_its_own_forward_reversed():
    model = make()
    for _ in range(2):
        loss = model(X, [0, 3, 1]).sum()
        model(X, [2, 1])  # a later forward changes nothing
        with CommLedger(model) as ledger:
            loss.backward()
    gathered = [event.unit for event in ledger.events if event.op == "all_gather"]
    assert gathered == ["blocks.1", "blocks.3", "blocks.0"]


@on_fake_ranks(2)
def test_prefetch_lists_replace_the_prediction():
    model, _ = sharded_and_plain(MlpStack())
    blocks, log, ledger = list(model.blocks), [], CommLedger()
    blocks[0].up.register_forward_pre_hook(
        lambda *_: log.extend([*(event.unit for event in ledger.events), "compute"])
    )
    blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
    blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[1]])
    with ledger:
        out = model(torch.ones(1, 6))
        assert log == ["(root)", "blocks.0", "blocks.2", "blocks.1", "compute"]
        assert len(ledger.events) == 4
        ledger.events.clear()
        out.sum().backward()
    gathers = [event.unit for event in ledger.events if event.unit.startswith("blocks")][:3]
    assert gathers == ["blocks.2", "blocks.0", "blocks.1"]


def add():
    """Return a module whose backward reads no parameter."""
    return Made(lambda m, x: x + m.bias, bias=nn.Parameter(torch.linspace(-1, 1, 6)))


@pytest.mark.parametrize(
    ("off", "reshard", "in_backward"),
    [
        ((), True, ["4", "3", "1", "0"]),
        (("0",), True, ["4", "3", "1"]),
        (("0", "3"), True, ["4", "1"]),
        (("0", "3"), False, []),
    ],
)
@on_threads(2)
def test_a_unit_that_needs_no_parameters_in_backward_is_not_gathered(off, reshard, in_backward):
    def step(model, rank):
        tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(rank))
        return model(tokens).square().mean()

    units = ["0", "1", "3", "4"]  # of which only the linear layers need parameters in backward
    plain = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), add(), nn.Linear(6, 6))
    model, _ = sharded_and_plain(plain, units, reshard_after_forward=reshard)
    for name in off:
        model.get_submodule(name).set_unshard_in_backward(False)
    events = check_training(model, plain, step).events
    gathered = [event.unit for event in events if event.op == "all_gather"]
    assert gathered == units + in_backward


@on_fake_ranks(2)
def test_it_may_change_between_steps_and_recurses_on_request_only():
    plain, counts = nn.Sequential(nn.Linear(6, 6), add(), nn.Linear(6, 6)), []
    model, _ = sharded_and_plain(plain, ("0", "1", "2"))
    for unit, flag, recurse in [
        (model[1], True, False),
        (model[1], False, False),
        (model[1], True, False),
        (model, False, False),  # does not reach the units inside
        (model[1], False, True),
    ]:
        unit.set_unshard_in_backward(flag, recurse=recurse)
        for _ in range(2):
            with CommLedger(model) as ledger:
                model(torch.ones(1, 6)).sum().backward()
        counts.append(ledger.counts["all_gather"])
    assert counts == [6, 5, 6, 6, 5]


def around():
    """Return a unit with a parameter of its own around a unit."""
    members = {"inner": nn.Linear(6, 6), "scale": nn.Parameter(torch.empty(6))}
    return Made(lambda m, x, is_scaled=True: m.inner(x * m.scale if is_scaled else x), **members)


AROUND = ("blocks.0.inner", "blocks.1.inner", "blocks")


@on_threads(2)
def test_a_unit_around_others_is_reduced_at_its_last_gradient():
    """Before backward goes on to what was computed before the unit."""

    def forward(model, x):
        x = model.blocks[0](x)
        x.register_hook(lambda _: sent.append([event.unit for event in ledger.events]))
        return model.blocks[1](x)

    sent = []
    plain = Made(forward, blocks=[around(), around()])
    model, _ = sharded_and_plain(plain, AROUND, reshard_after_forward=False)
    loss = model(torch.ones(3, 6)).sum()
    with CommLedger(model) as ledger:
        loss.backward()
    assert sent == [["blocks.1.inner", "blocks.1"]]


@on_threads(2)
def test_a_unit_around_others_is_reduced_before_earlier_units_if_it_lacks_a_gradient():
    """The other rank reduces it at its last gradient, so both send in the same order."""

    def step(model, rank):
        x = model.blocks[0](inputs_of(rank))
        return model.blocks[1](x, rank == 0).square().mean()

    plain = Made(step, blocks=[around(), around()])
    ledger = check_gradients(*sharded_and_plain(plain, AROUND), lambda m, r: m(r))
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    assert reduced == ["blocks.1.inner", "blocks.1", "blocks.0.inner", "blocks.0"]


@on_threads(2)
def test_a_unit_of_two_forwards_is_reduced_once_after_the_backward_of_the_first():
    model, plain = sharded_and_plain(MlpStack())
    ledger = check_gradients(
        model, plain, lambda m, rank: (m(inputs_of(rank)) + m(inputs_of(rank))).square().mean()
    )
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    assert reduced == ["blocks.2", "blocks.1", "blocks.0", "(root)"]


@on_threads(2)
def test_a_backward_gathers_nothing_ahead_of_a_part_that_ran_under_no_grad():
    def forward(model, x):
        with torch.no_grad():
            x = model.tower[1](model.tower[0](x))
        return model.blocks[1](model.blocks[0](x))

    layers = {name: [MlpBlock(4, 4) for _ in range(2)] for name in ("tower", "blocks")}
    model = seeded(Made(forward, **layers))
    model.tower.requires_grad_(False)
    for layer in (*model.tower, *model.blocks):
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    for _ in range(2):
        loss = model(X).sum()
        with CommLedger(model) as ledger:
            loss.backward()
        assert not any(event.unit.startswith("tower") for event in ledger.events)
