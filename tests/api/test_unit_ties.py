"""Parameters that are tied, or in a module that is registered twice: which unit takes them."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshard import fully_shard, fully_shard_units
from tests.support import insides
from tests.support.against_plain import check_gradients, sharded_and_plain
from tests.support.insides import sharded_modules, taken_by
from tests.support.models import Made, MlpBlock, Transformer, TransformerBlock
from tests.support.ranks import on_fake_ranks, on_threads


@on_fake_ranks(4)
def test_an_embedding_tied_with_the_head_goes_to_the_root():
    model = Transformer(tied=True)
    fully_shard_units(model, units=(nn.Embedding, nn.Linear, TransformerBlock))
    assert ["embedding.weight", "head.weight"] in taken_by(model)[""]
    assert not sharded_modules(model) & {"embedding", "head"}  # nothing is left for them
    assert model.head.weight is model.embedding.weight


class Pair(nn.Module):
    """Two blocks, one of whose weights is shared, in a list inside a module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(4, 4) for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@on_fake_ranks(4)
def test_a_tie_goes_to_the_lowest_unit_around_all_uses_past_containers():
    model = nn.Sequential(Pair(), Pair(), nn.Linear(4, 4))
    fully_shard_units(model, units=(Pair, MlpBlock))
    taken = taken_by(model)
    assert taken["0"] == [["0.blocks.0.up.weight", "0.blocks.1.up.weight"]]
    assert "up.weight" not in str(taken["0.blocks.0"]) + str(taken[""])


@on_fake_ranks(4)
def test_a_tie_goes_past_modules_that_are_no_units():
    model = nn.Sequential(Pair(), nn.Linear(4, 4))
    fully_shard_units(model, units=MlpBlock)
    assert ["0.blocks.0.up.weight", "0.blocks.1.up.weight"] in taken_by(model)[""]


@on_fake_ranks(4)
def test_a_manual_unit_may_use_a_tie_that_was_left_out_for_the_root():
    model = Pair()
    tied = model.blocks[0].up.weight
    fully_shard(model.blocks[0], ignored_params={tied})
    assert fully_shard_units(model) == ["", "blocks.0", "blocks.1"]
    assert ["blocks.0.up.weight", "blocks.1.up.weight"] in taken_by(model)[""]
    assert model.blocks[0].up.weight is model.blocks[1].up.weight


@on_fake_ranks(4)
def test_a_manual_unit_that_has_cut_a_tie_is_an_error():
    model = Pair()
    fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match=r"is tied to 'MlpBlock\.up\.weight'"):
        fully_shard_units(model)


@on_fake_ranks(4)
def test_a_tie_of_a_list_names_the_modules_in_it():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "norm": nn.LayerNorm(4)})
    model["head"] = nn.Linear(4, 8, bias=False)
    model["head"].weight = model["embedding"].weight
    fully_shard([model["norm"], model["head"]])
    with pytest.raises(ValueError, match=r"'Embedding\.weight' is tied to 'Linear\.weight'"):
        fully_shard(model["embedding"])
    with pytest.raises(ValueError, match=r"'Embedding\.weight' is tied to 'Linear\.weight'"):
        fully_shard([nn.LayerNorm(4), model["embedding"]])


@on_fake_ranks(4)
def test_a_module_registered_twice_is_one_unit_that_keeps_its_parameters():
    shared = MlpBlock(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(shared))
    assert fully_shard_units(model, units=(MlpBlock, nn.Sequential)) == ["", "0", "0.0"]
    assert len(taken_by(model)["0.0"]) == 4


@on_fake_ranks(4)
def test_a_shared_module_that_is_no_unit_is_owned_around_both_uses():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), shared) for _ in range(2)])
    assert fully_shard_units(model) == ["", "0", "1"]
    assert taken_by(model)[""] == [["0.1.weight"], ["0.1.bias"]]


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
    names = fully_shard_units(
        model, units=lambda fqn, m: numbers[m] in chosen | {1}, min_params=min_params
    )
    owners = [
        (owner, name)
        for unit in {*insides.units(model)}
        for param in unit.group.params
        for owner, name in param.owners
    ]
    assert len(owners) == len(set(owners)) == len({module for _, module in holders})
    for occurrences in uses.values():
        shown = {id(module.weight) for _, module in occurrences}
        assert len(shown) == 1  # ties hold
        (weight,) = {module.weight for _, module in occurrences}
        (around,) = {
            unit
            for n in names
            for unit in insides.own_units(model.get_submodule(n))
            if any(p.sharded is weight for p in unit.params)
        }
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
