"""The situations of these files with our library. ``python -m tests.peers`` has torch's beside."""

import copy
from itertools import product

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import Shard

import meshard
from tests.peers import gradients, programs, state
from tests.peers.both import SITUATIONS, run
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks

FILES = (gradients, programs, state)  # which fill SITUATIONS


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_we_are_right(run_ranks, name):
    act, expected, num_ranks = SITUATIONS[name]
    assert run_ranks(run, num_ranks, act, "meshard") == [expected] * num_ranks


@on_ranks(4)
def test_parameters_gradients_and_state_of_uneven_shards():
    pair = programs.widths(meshard, 9, 5)
    weight = pair.model[0].weight
    assert weight.placements == (Shard(0),) and pair.model[2].weight.placements == (Shard(1),)
    for param, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        dim = param.placements[0].dim
        parts = plain.chunk(dist.get_world_size(), dim)
        mine = parts[dist.get_rank()] if dist.get_rank() < len(parts) else plain.narrow(dim, 0, 0)
        assert_same(param.to_local(), mine.detach())
    pair.train()
    unsharded = get_model_state_dict(pair.model, options=StateDictOptions(full_state_dict=True))
    assert_same(unsharded, dict(pair.plain.state_dict()))
    for shards in (pair.model.state_dict(), unsharded):
        other = programs.widths(meshard, 9, 5)
        is_full = shards is unsharded
        options = StateDictOptions(full_state_dict=is_full)
        set_model_state_dict(other.model, copy.deepcopy(shards), options=options)
        other.plain.load_state_dict(pair.plain.state_dict())
        assert_same(full_state(other.model), full_state(pair.plain))
        other.train()


@on_ranks(4)
def test_boolean_setters_in_any_order():
    """``set_requires_gradient_sync`` sets both stages, ``set_requires_all_reduce`` the second."""
    unit = gradients.two(meshard)
    calls = list(product(("set_requires_gradient_sync", "set_requires_all_reduce"), (False, True)))
    for sequence in product(calls, repeat=3):
        unit.set_requires_gradient_sync(True)
        reduces = over_replicas = True
        for name, value in sequence:
            getattr(unit, name)(value)
            over_replicas = value
            reduces = value if name == "set_requires_gradient_sync" else reduces
        unit.zero_grad()
        with meshard.CommLedger(unit) as ledger:
            unit(1.0, 1.0).backward()
        assert ("reduce_scatter" in ledger.counts) is reduces, sequence
        assert ("all_reduce" in ledger.counts) is (reduces and over_replicas), sequence
