"""Parameters that are tied, or in a module that is registered twice, among units.

``test_auto_units`` has a table of which unit takes them.
"""

import functools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshard import FSDPModule, fully_shard, fully_shard_units
from tests.support import insides
from tests.support.against_plain import check_gradients, sharded_and_plain
from tests.support.models import Made
from tests.support.ranks import on_fake_ranks, on_threads


@on_fake_ranks(4)
def test_a_unit_that_cuts_a_tie_is_refused_and_both_parameters_are_named():
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    fully_shard([model[1], model[2]])
    for apply, given_, name in [
        (fully_shard, model[0], "Embedding"),
        (fully_shard, [nn.LayerNorm(4), model[0]], "Embedding"),
        (fully_shard, model, "Sequential.0"),
        (fully_shard_units, model, "Sequential.0"),
    ]:
        text = rf"'{name}\.weight' is tied to 'Linear\.weight', .*\.fully_shard_units"
        with pytest.raises(ValueError, match=text):
            apply(given_)


def assigned(one, other):
    """Load tied weights as ``torch.load`` returns them: two tensors of one storage."""
    for layer, weight in ((one, other.weight.data), (other, other.weight.data)):
        layer.load_state_dict({"weight": weight}, assign=True)


SHARED = {
    "data": lambda one, other: setattr(one.weight, "data", other.weight.data),
    "transposed": lambda one, other: setattr(one, "weight", nn.Parameter(other.weight.data.t())),
    "row": lambda one, other: setattr(one, "weight", nn.Parameter(other.weight.data[5])),
    "column": lambda one, other: setattr(one, "weight", nn.Parameter(other.weight.data[:, 0])),
    "assign": assigned,
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
@on_fake_ranks(4)
def test_parameters_that_share_memory_are_refused_and_both_are_named(share, device):
    def pair():
        layers = [nn.Linear(8, 8, bias=False, device=device) for _ in range(2)]
        share(*layers)
        return nn.Sequential(*layers)

    def refused(apply, names):
        with pytest.raises(ValueError, match=f"^parameters {names} share memory but are two"):
            apply()

    names = r"'Sequential\.[01]\.weight' and 'Sequential\.[01]\.weight'"
    model = pair()
    refused(lambda: fully_shard(model), names)
    refused(lambda: fully_shard_units(model), names)
    refused(lambda: fully_shard([*model]), r"'Linear\.weight' and 'Linear\.weight'")
    assert not [each for each in model.modules() if isinstance(each, FSDPModule)]
    for inner in ([0], [1], [0, 1]):
        model = pair()
        for index in inner:
            fully_shard(model[index])
        for apply in (fully_shard, fully_shard_units):
            refused(functools.partial(apply, model), names)


@on_fake_ranks(4)
def test_parameters_that_share_a_storage_but_no_element_are_sharded():
    flat = torch.zeros(4, 4)
    parts = [flat[0], flat[1], flat[2:, :2], flat[2:, 2:], flat[:0], flat[:0]]
    model = nn.ParameterList(parts)
    model.forward = len
    fully_shard(Made(len, inner=fully_shard(Made(len, parts=nn.ParameterList(parts)))))


@on_fake_ranks(4)
def test_two_models_that_share_memory_are_sharded_each_on_its_own():
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(model.state_dict(), assign=True)
    for each in (model, other):
        fully_shard(each)
    assert torch.equal(model.weight.to_local(), other.weight.to_local())
    assert model.weight.to_local().data_ptr() != other.weight.to_local().data_ptr()


@on_fake_ranks(4)
def test_modules_that_hold_the_same_child_twice_may_be_nested_deep():
    model = nn.Linear(4, 4)
    for _ in range(25):  # 2**25 paths lead to the innermost layer
        model = nn.Sequential(model, model)
    start = time.perf_counter()
    names = fully_shard_units(model, units=lambda fqn, _: fqn == "0.0.0.0.0")
    assert names == ["", "0.0.0.0.0"] and len(list(model.parameters())) == 2
    assert time.perf_counter() - start < 5


@st.composite
def trees(draw):
    """A tree of modules whose leaves are linear layers, some registered twice or tied."""
    pool = [nn.Linear(3, 3, bias=False) for _ in range(draw(st.integers(2, 5)))]
    for one, other in draw(st.lists(st.tuples(*[st.sampled_from(pool)] * 2), max_size=2)):
        one.weight = other.weight

    def tree(depth):
        children = draw(st.integers(1, 3)) if depth else 0
        if not children:
            return draw(st.sampled_from(pool))
        return nn.Sequential(*[tree(depth - 1) for _ in range(children)])

    return nn.Sequential(tree(draw(st.integers(1, 3))), tree(2))


@given(trees(), st.sets(st.integers(0, 30)), st.sampled_from([0, 10, 18, 40]))
@on_fake_ranks(4)
def test_every_parameter_is_taken_once_by_a_unit_around_all_its_uses(model, chosen, min_params):
    numbers = {module: number for number, module in enumerate(model.modules())}
    holders = [
        (fqn, module)
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    ]
    uses = {}
    for fqn, module in holders:
        uses.setdefault(module.weight, []).append((fqn, module))
    fully_shard_units(model, units=lambda _, m: numbers[m] in chosen | {1}, min_params=min_params)
    units = {*insides.units(model)}
    owners = [at for unit in units for param in unit.group.params for at in param.owners]
    assert len(owners) == len(set(owners)) == len({module for _, module in holders})
    for occurrences in uses.values():
        (weight,) = {module.weight for _, module in occurrences}  # ties hold
        (around,) = [u for u in units if any(p.sharded is weight for p in u.params)]
        paths = []
        for fqn, _ in occurrences:
            parts = fqn.split(".")
            paths.append({model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)})
        assert any(all(ref() in path for path in paths) for ref in around.modules)
        if around.parent is not None:
            assert sum(param.sharded.numel() for param in around.params) >= min_params
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("units", [(), ("embedding",), ("head",)])
@on_threads(2)
def test_a_tie_that_is_made_after_fully_shard(units):
    """Between units it is right. In one unit it is refused: one use would get no gradient."""
    members = {"embedding": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)}
    model, plain = sharded_and_plain(Made(lambda m, x: m.head(m.embedding(x)), **members), units)
    for each in (model, plain):
        each.head.weight = each.embedding.weight

    def step(each, rank):
        return each(torch.arange(4) + 4 * rank).square().mean()

    if units:
        check_gradients(model, plain, step)
    else:
        with pytest.raises(
            RuntimeError, match=r"'head\.weight' .* was tied to 'embedding\.weight'"
        ):
            step(model, 0)


@on_threads(2)
def test_a_tie_outlasts_the_assignment_to_one_of_its_places():
    members = {"embedding": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)}
    members["head"].weight = members["embedding"].weight
    model, _ = sharded_and_plain(Made(lambda m, x: m.head(m.embedding(x)), **members), ())
    new = model.head.weight = nn.Parameter(torch.ones(8, 8))
    model(torch.arange(4)).mean().backward()
    model.reshard()
    assert model.head.weight is model.embedding.weight is not new
    assert model.embedding.weight.full_tensor().equal(new)
