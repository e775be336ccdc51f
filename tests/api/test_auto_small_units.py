"""Small neighbours that ``fully_shard_units(min_params=)`` joins to units of a middle size."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import CommLedger, describe, fully_shard_units
from tests.support.fake import fake_group
from tests.support.models import ChosenBlocks, MlpBlock, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.units_made import taken_by

BLOCK = 40  # parameters of MlpBlock(4, 4)
TINY = 40  # blocks


@pytest.fixture
def four_ranks():
    with fake_group(4):
        yield


def tiny_units():
    return nn.Sequential(*[MlpBlock(4, 4) for _ in range(TINY)])


def members(model):
    """Return the names of the modules of each unit, by that of its first."""
    found = {}
    for fqn, module in model.named_modules():
        if (unit := vars(module).get("_meshard_unit")) is not None:
            found.setdefault(unit, []).append(fqn)
    return {names[0]: names for names in found.values()}


def sizes(model):
    """Return the number of parameters of each unit, by the name of its first module."""
    units = {name: vars(model.get_submodule(name))["_meshard_unit"] for name in members(model)}
    return {name: sum(p.sharded.numel() for p in unit.params) for name, unit in units.items()}


@pytest.mark.parametrize("min_params", [0, BLOCK, BLOCK + 1, 5 * BLOCK, 6 * BLOCK, TINY * BLOCK])
@pytest.mark.parametrize("units", ["auto", nn.Linear])
def test_forty_tiny_units_become_some_of_a_middle_size(four_ranks, units, min_params):
    model = tiny_units()
    names = fully_shard_units(model, units=units, min_params=min_params)
    root, *own = sizes(model).values()
    assert root + sum(own) == TINY * BLOCK and len(own) == len(names) - 1 > 0
    if min_params:
        assert root < min_params
        assert all(min_params <= numel < 2 * min_params for numel in own)
        with CommLedger(model) as ledger:
            model(torch.ones(1, 4)).sum().backward()
        assert 0 < ledger.counts["all_gather"] <= 2 + 2 * (TINY * BLOCK / min_params)


def test_too_few_for_one_unit_go_to_the_root(four_ranks):
    model = tiny_units()
    assert fully_shard_units(model, min_params=TINY * BLOCK + 1) == [""]
    assert sizes(model) == {"": TINY * BLOCK}


def test_what_is_left_of_a_row_goes_to_the_root(four_ranks):
    model = nn.Sequential(*[MlpBlock(4, 4) for _ in range(5)])
    assert fully_shard_units(model, min_params=2 * BLOCK) == ["", "0", "2"]
    assert members(model) == {"": [""], "0": ["0", "1"], "2": ["2", "3"]}
    assert ["4.up.weight"] in taken_by(model)[""]
    rows = describe(model).splitlines()[2:4]
    assert [row.split()[-2:] for row in rows] == [["2", "modules"]] * 2


def test_a_large_unit_ends_a_row(four_ranks):
    model = nn.Sequential(*[nn.Linear(n, n, bias=False) for n in (4, 4, 9, 4, 4, 4, 9, 4)])
    assert fully_shard_units(model, min_params=32) == ["", "0", "2", "3", "6"]
    assert members(model)["3"] == ["3", "4"]
    assert taken_by(model)[""] == [["5.weight"], ["7.weight"]]


def test_blocks_of_which_inner_units_have_taken_the_most_are_joined_too(four_ranks):
    model = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)) for _ in range(4)]
    )
    names = fully_shard_units(model, units=(nn.Sequential, nn.Linear), min_params=32)
    assert names == ["", "0", "0.1", "1.1", "2", "2.1", "3.1"]
    assert taken_by(model)["0"] == [
        [f"{n}.0.{name}"] for n in (0, 1) for name in ("weight", "bias")
    ]


def test_only_units_with_the_same_arguments_are_joined(four_ranks):
    model = nn.Sequential(*[MlpBlock(4, 4) for _ in range(6)])
    kept = {"reshard_after_forward": False}
    fully_shard_units(
        model, min_params=2 * BLOCK, overrides=lambda fqn, _: kept if fqn in ("3", "4") else None
    )
    assert members(model) == {"": [""], "0": ["0", "1"], "3": ["3", "4"]}
    assert ["2.up.weight"] in taken_by(model)[""] and ["5.up.weight"] in taken_by(model)[""]
    assert vars(model[4])["_meshard_unit"].settings.reshard_after_forward is False


def test_what_several_modules_share_is_in_the_root(four_ranks):
    shared = MlpBlock(4, 4)
    blocks = [MlpBlock(4, 4) for _ in range(4)]
    blocks[1].up.weight = blocks[0].up.weight
    model = nn.Sequential(*[nn.Sequential(each, shared) for each in blocks])
    names = fully_shard_units(model, units=MlpBlock, min_params=48)
    assert names == ["", "0.0", "2.0"]
    assert members(model)["0.0"] == ["0.0", "1.0"]
    assert ["0.0.up.weight", "1.0.up.weight"] in taken_by(model)[""]
    assert ["0.1.up.weight"] in taken_by(model)[""]


def test_a_second_call_changes_nothing(four_ranks):
    model = tiny_units()
    names = fully_shard_units(model, min_params=5 * BLOCK)
    before = members(model)
    assert fully_shard_units(model, min_params=5 * BLOCK) == names and members(model) == before


def train_chosen(min_params):
    """Ranks run different blocks of one unit, and other ones in each step."""
    plain, model = seeded(ChosenBlocks()), seeded(ChosenBlocks())
    assert len(fully_shard_units(model, init_device_mesh("cpu", (2,)), min_params=min_params)) == 2
    x = torch.ones(2, 6)
    for chosen in [((0, 1), (1, 2)), ((2,), (0,)), ((0, 1, 2), (2, 0))]:
        model(x, chosen[dist.get_rank()]).sum().backward()
        for each in chosen:
            (plain(x, each).sum() / 2).backward()
        assert_same(full_grads(model), full_grads(plain))
        model.zero_grad(), plain.zero_grad()


def test_ranks_may_run_different_modules_of_a_joined_unit(run_ranks):
    run_ranks(train_chosen, 2, 300)


@on_ranks(2)
def test_a_joined_model_trains_like_one_process():
    plain, model = seeded(MlpStack(depth=6)), seeded(MlpStack(depth=6))
    mesh = init_device_mesh("cpu", (2,))
    assert fully_shard_units(model, mesh, min_params=2 * 136, sync_init=True) == [
        "",
        "blocks.0",
        "blocks.2",
        "blocks.4",
    ]
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    optimizers = adam(model.parameters()), adam(plain.parameters())
    for step in range(3):
        x = torch.full((2, 6), 0.1 * (step + 1))
        for each in (model, plain):
            each(x).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(x), plain(x))
