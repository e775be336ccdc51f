"""Ranks that use different parameters: they issue the same collectives in the same order."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made, seeded
from tests.support.ones import make, values
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread


def assert_same_events_on_all_ranks(ledger):
    events = [(event.op, event.unit) for event in ledger.events]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, events)
    assert found == [events] * len(found)


def choice():
    """Return a module that passes its input on, and adds those parameters that it is to use."""

    def forward(module, x, use):
        chosen = zip((module.a, module.b), use, strict=True)
        return x + sum(param.sum() * 1.0 for param, used in chosen if used)

    return Made(forward, a=nn.Parameter(torch.zeros(4)), b=nn.Parameter(torch.zeros(4)))


def patterns():
    """Yield, by rank and forward, which parameters of two units are used."""
    generator = torch.Generator().manual_seed(7)
    yield [[[[0, 0], [0, 0]], [[1, 1], [0, 1]]], [[[0, 0], [0, 0]], [[0, 1], [0, 0]]]]
    for _ in range(40):
        yield torch.randint(0, 2, (2, 2, 2, 2), generator=generator).tolist()


@pytest.mark.parametrize("pattern", list(patterns()))
@on_threads(2)
def test_two_forwards_and_one_backward_of_ranks_that_use_different_parameters(pattern):
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
    times_used = torch.tensor(pattern).sum((0, 1)) / 2
    used = {
        f"blocks.{unit}.{ab}": times_used[unit, n] for unit in (0, 1) for n, ab in enumerate("ab")
    }
    assert values(model) == {"own": 2.0, **{name: n.item() or None for name, n in used.items()}}
    assert_same_events_on_all_ranks(ledger)


@on_threads(3)
def test_a_parent_that_hands_on_what_its_child_gave_on_some_ranks():
    def forward(module, x, use):
        y = module.inner(x, (1, 1))
        return y * module.scale.sum() if use else y

    model = Made(forward, inner=choice(), scale=nn.Parameter(torch.ones(4)))
    meshard.fully_shard(model.inner, reshard_after_forward=True)
    meshard.fully_shard(model, reshard_after_forward=True)
    with meshard.CommLedger(model) as ledger:
        model(torch.ones(()), dist.get_rank() == 0).backward()
    assert values(model)["inner.a"] == pytest.approx((4.0 + 1.0 + 1.0) / 3)
    assert_same_events_on_all_ranks(ledger)


@on_threads(2)
def test_freezing_between_forward_and_backward_keeps_ranks_together():
    model = make((2,))
    loss = model(1.0, 1.0 if dist.get_rank() else None)
    model.b.requires_grad_(False)
    loss.backward()
    # As on one process, autograd leaves out what is frozen when its gradient comes.
    assert values(model) == {"a": 1.0, "b": None}


def part():
    def forward(module, x, uses, reentrant=False):
        inner = module.inner
        x = checkpoint(inner, x, use_reentrant=True) if reentrant else inner(x)
        for other, used in zip(module.others, uses, strict=True):
            x = x + other(x) if used else x
        return x

    return Made(forward, inner=nn.Linear(4, 4), others=[nn.Linear(4, 4), nn.Linear(4, 4)])


ALL, SOME, NONE = (True, True), (True, False), (False, False)
CALLS = {  # of both ranks: which part is called, and which of its layers that uses
    "each once": [[(0, ALL), (1, ALL)], [(0, SOME), (1, NONE)]],
    "each twice": [
        [(0, ALL), (0, ALL), (1, ALL), (1, ALL)],
        [(0, SOME), (0, NONE), (1, SOME), (1, ALL)],
    ],
    "one around the other": [[(0, NONE), (1, ALL), (0, ALL)], [(0, ALL), (1, NONE), (0, NONE)]],
}


@on_ranks(2)
@spread(inner_too=[False, True], reentrant=[False, True], calls=CALLS)
def test_ranks_use_different_layers_of_units_called_in_any_order(calls, reentrant, inner_too):
    def forward(module, x, uses):
        x = x * module.scale
        for number, use in uses:
            x = module.parts[number](x, use, reentrant)
        return x

    def step(model, rank, *, swap):
        return model(inputs_of(rank, shape=(3, 4)), CALLS[calls][rank ^ swap]).square().mean()

    plain = Made(forward, scale=nn.Parameter(torch.ones(4)), parts=[part(), part()])
    inner = ["parts.0.inner", "parts.1.inner"] if inner_too else []
    model, plain = sharded_and_plain(plain, units=[*inner, "parts"])
    for swap in (False, True):
        check_gradients(model, plain, partial(step, swap=swap), times=1)


@on_ranks(2)
@pytest.mark.parametrize("two_losses", [False, True])
def test_a_recomputation_belongs_to_the_forward_whose_backward_runs(two_losses):
    """Before the last unit stands one that is recomputed by a checkpoint that calls backward."""

    def forward(module, x, uses):
        return module.last(checkpoint(module.inner, module.first(x), use_reentrant=True), uses)

    def step(model, rank):
        x = inputs_of(rank, shape=(3, 4))
        loss = model(x, (ALL, SOME)[rank]).square().mean()
        other = model(x, ALL).square().mean()  # records a graph, too
        return loss + other if two_losses else loss

    members = {"first": nn.Linear(4, 4), "inner": nn.Linear(4, 4), "last": part()}
    model, plain = sharded_and_plain(
        Made(forward, **members), units=members, reshard_after_forward=True
    )
    assert_same_events_on_all_ranks(check_gradients(model, plain, step, times=1))


@on_ranks(2)
def test_ranks_agree_on_the_order_around_a_frozen_unit():
    """A root around a frozen unit around a trained one; the root's own parameters come last."""

    def forward(module, x, with_bias):
        last = module.last
        return nn.functional.linear(module.middle(x), last.weight, last.bias if with_bias else None)

    middle = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3, bias=False))
    plain = Made(forward, middle=middle, last=nn.Linear(3, 5))
    model, plain = sharded_and_plain(plain, units=["middle.1", "middle"])
    # Rank 0 has all gradients of the root before the unit inside has any; rank 1 has not.
    x = torch.arange(6.0).view(2, 3)
    check_gradients(model, plain, lambda model, rank: model(x, rank == 0).sum(), times=3)


@pytest.mark.parametrize(
    ("is_recomputed", "uses_of_rank_1"), [(False, (SOME, ALL)), (True, (ALL, SOME))]
)
@pytest.mark.filterwarnings("ignore:.*no tensor was found")
@on_threads(2)
def test_ranks_agree_on_the_order_where_outputs_are_not_found(is_recomputed, uses_of_rank_1):
    """Nothing tells when their backward begins. The unit inside comes first all the same."""

    def hiding(module, x, uses):
        result = module.inner(x, uses)
        return lambda: result

    def forward(module, x, uses, own_uses):
        if is_recomputed:
            x = checkpoint(module.unit.inner, x, uses, use_reentrant=True)
        else:
            x = module.unit(x, uses)()
        result = module.last(x, own_uses)
        return lambda: result

    model = Made(forward, unit=Made(hiding, inner=choice()), last=choice())
    meshard.fully_shard(model.unit.inner if is_recomputed else model.unit)
    meshard.fully_shard(model)
    uses = uses_of_rank_1 if dist.get_rank() else (ALL, ALL)
    loss = model(torch.zeros((), requires_grad=True), *uses)()
    with meshard.CommLedger(model) as ledger:
        loss.backward()
    assert_same_events_on_all_ranks(ledger)


@on_threads(2)
def test_ranks_agree_on_the_order_before_a_frozen_unit_is_recomputed():
    """The root has all its gradients, but is reduced after that unit is gathered again."""

    def forward(module, x, uses):
        x = checkpoint(lambda x: module.frozen(x).tanh(), x, use_reentrant=False)
        x = x + module.constant(torch.ones(4))  # gathered ahead in the place of ``frozen``
        return module.last(module.unit(x, uses), ALL)

    frozen = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    members = {"frozen": frozen[0], "constant": frozen[1], "unit": choice(), "last": choice()}
    model = seeded(Made(forward, **members))
    for each in (*frozen, model.unit, model):
        meshard.fully_shard(each)
    loss = model(torch.ones(4, requires_grad=True), (ALL, SOME)[dist.get_rank()]).sum()
    with meshard.CommLedger(model) as ledger:
        loss.backward()
    assert_same_events_on_all_ranks(ledger)
