"""Ranks that use different parameters: they issue the same collectives in the same order."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.models import Made, seeded
from tests.support.ones import make, values
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.spread import spread
from tests.support.threads import run_threads


class Boom(Exception):
    """What fails."""


def choice():
    """Return a module that passes its input on, and adds those parameters that it is to use."""

    def forward(module, x, use):
        chosen = zip((module.a, module.b), use, strict=True)
        return x + sum(param.sum() * 1.0 for param, used in chosen if used)

    return Made(forward, a=nn.Parameter(torch.zeros(4)), b=nn.Parameter(torch.zeros(4)))


def two_choices():
    def forward(module, uses):
        x = module.own.sum()
        for unit, use in zip(module.u, uses, strict=True):
            x = unit(x, use)
        return x

    return Made(forward, own=nn.Parameter(torch.zeros(4)), u=[choice(), choice()])


def two_forwards(pattern):
    mesh = init_device_mesh("cpu", (2,))
    model = two_choices()
    for unit in model.u:
        meshard.fully_shard(unit, mesh, reshard_after_forward=True)
    meshard.fully_shard(model, mesh)
    with meshard.CommLedger(model) as ledger:
        first, second = pattern[dist.get_rank()]
        (model(first) + model(second)).backward()
    return {n: None if g is None else g[0].item() for n, g in full_grads(model).items()}, [
        (event.op, event.unit) for event in ledger.events
    ]


def patterns():
    generator = torch.Generator().manual_seed(7)
    yield (
        (((0, 0), (0, 0)), ((1, 1), (0, 1))),
        (((0, 0), (0, 0)), ((0, 1), (0, 0))),
    )
    for _ in range(40):
        drawn = torch.randint(0, 2, (2, 2, 2, 2), generator=generator).tolist()
        yield tuple(tuple(tuple(map(tuple, call)) for call in rank) for rank in drawn)


@pytest.mark.parametrize("pattern", list(patterns()))
def test_two_forwards_and_one_backward_of_ranks_that_use_different_parameters(pattern):
    expected = {"own": 2.0}
    for unit in range(2):
        for number, name in enumerate("ab"):
            uses = [pattern[r][call][unit][number] for r in range(2) for call in range(2)]
            expected[f"u.{unit}.{name}"] = sum(uses) / 2 if any(uses) else None
    (first, events), (second, others) = run_threads(two_forwards, 2, pattern)
    assert first == second == expected
    assert events == others
    assert [op for op, _ in events].count("reduce_scatter") == 3


def hand_on():
    mesh = init_device_mesh("cpu", (3,))

    def forward(module, x, use):
        y = module.inner(x, (1, 1))
        return y * module.scale.sum() if use else y

    model = Made(forward, inner=choice(), scale=nn.Parameter(torch.ones(4)))
    meshard.fully_shard(model.inner, mesh, reshard_after_forward=True)
    meshard.fully_shard(model, mesh, reshard_after_forward=True)
    with meshard.CommLedger(model) as ledger:
        model(torch.ones(()), dist.get_rank() == 0).backward()
    return full_grads(model)["inner.a"][0].item(), [(e.op, e.unit) for e in ledger.events]


def test_a_parent_that_hands_on_what_its_child_gave_on_some_ranks():
    (first, events), *others = run_threads(hand_on, 3)
    assert first == pytest.approx((4.0 + 1.0 + 1.0) / 3)
    assert all(other == (first, events) for other in others)


def freeze_between():
    model = make((2,))
    loss = model(1.0, 1.0 if dist.get_rank() else None)
    model.b.requires_grad_(False)
    loss.backward()
    return values(model)


def test_freezing_between_forward_and_backward_keeps_ranks_together():
    # As on one process, autograd leaves out what is frozen when its gradient comes.
    assert run_threads(freeze_between, 2) == [{"a": 1.0, "b": None}] * 2


def part():
    def forward(module, x, uses, reentrant):
        inner = module.inner
        x = checkpoint(inner, x, use_reentrant=True) if reentrant else inner(x)
        for other, used in zip(module.others, uses, strict=True):
            x = x + other(x) if used else x
        return x

    return Made(forward, inner=nn.Linear(4, 4), others=[nn.Linear(4, 4), nn.Linear(4, 4)])


def two_parts():
    """``uses`` of a forward: for each call of a part, which of its layers a rank uses."""

    def forward(module, x, uses, reentrant):
        x = x * module.scale
        for number, use in uses:
            x = module.parts[number](x, use, reentrant)
        return x

    return Made(forward, scale=nn.Parameter(torch.ones(4)), parts=[part(), part()])


ALL, SOME, NONE = (True, True), (True, False), (False, False)
CALLS = {  # of both ranks
    "each once": [[(0, ALL), (1, ALL)], [(0, SOME), (1, NONE)]],
    "each twice": [
        [(0, ALL), (0, ALL), (1, ALL), (1, ALL)],
        [(0, SOME), (0, NONE), (1, SOME), (1, ALL)],
    ],
    "one around the other": [[(0, NONE), (1, ALL), (0, ALL)], [(0, ALL), (1, NONE), (0, NONE)]],
}


def train_parts(calls, reentrant, inner_too):
    plain = seeded(two_parts())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for part in model.parts:
        if inner_too:
            meshard.fully_shard(part.inner, mesh)
        meshard.fully_shard(part, mesh)
    meshard.fully_shard(model, mesh)
    xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for swap in (False, True):
        for each in (model, plain):
            each.zero_grad()
        for rank in range(2):
            uses = calls[rank ^ swap]
            if rank == dist.get_rank():
                model(xs[rank], uses, reentrant).square().mean().backward()
            (plain(xs[rank], uses, False).square().mean() / 2).backward()
        assert_same(full_grads(model), full_grads(plain))


@spread(inner_too=[False, True], reentrant=[False, True], calls=CALLS)
def test_ranks_use_different_layers_of_units_called_in_any_order(
    run_ranks, calls, reentrant, inner_too
):
    run_ranks(train_parts, 2, CALLS[calls], reentrant, inner_too)


def recomputed_between(two_losses):
    """Before the last unit stands one that is recomputed by a checkpoint that calls backward."""

    def forward(module, x, uses):
        x = checkpoint(module.inner, module.first(x), use_reentrant=True)
        return module.last(x, uses, False)

    linear = [nn.Linear(4, 4) for _ in range(2)]
    plain = seeded(Made(forward, first=linear[0], inner=linear[1], last=part()))
    model = copy.deepcopy(plain)
    for unit in (*model.children(), model):
        meshard.fully_shard(unit, reshard_after_forward=True)
    xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    rank = dist.get_rank()
    with meshard.CommLedger(model) as ledger:
        loss = model(xs[rank], (ALL, SOME)[rank]).square().mean()
        other = model(xs[rank], ALL).square().mean()  # records a graph, too
        (loss + other if two_losses else loss).backward()
    for x, uses in zip(xs, (ALL, SOME), strict=True):
        loss = plain(x, uses).square().mean()
        ((loss + plain(x, ALL).square().mean() if two_losses else loss) / 2).backward()
    assert_same(full_grads(model), full_grads(plain))
    return [(event.op, event.unit) for event in ledger.events]


@pytest.mark.parametrize("two_losses", [False, True])
def test_a_recomputation_belongs_to_the_forward_whose_backward_runs(run_ranks, two_losses):
    events, others = run_ranks(recomputed_between, 2, two_losses)
    assert events == others


@on_ranks(2)
def test_ranks_agree_on_the_order_around_a_frozen_unit():
    """A root around a frozen unit around a trained one; the root's own parameters come last."""

    def forward(module, x, with_bias):
        last = module.last
        return nn.functional.linear(module.middle(x), last.weight, last.bias if with_bias else None)

    middle = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3, bias=False))
    model = seeded(Made(forward, middle=middle, last=nn.Linear(3, 5)))
    plain = copy.deepcopy(model)
    for unit in (model.middle[1], model.middle, model):
        meshard.fully_shard(unit)
    x = torch.arange(6.0).view(2, 3)
    for step in range(3):
        # Rank 0 has all gradients of the root before the unit inside has any; rank 1 has not.
        model(x + step, dist.get_rank() == 0).sum().backward()
        for rank in range(2):
            (plain(x + step, rank == 0).sum() / 2).backward()
        assert_same(full_grads(model), full_grads(plain), what=f"step {step}")
