"""Blocking collectives: which rank has what, in every dtype."""

import pytest
import torch
import torch.distributed as dist

from meshard._comm.blocking import broadcast, gather_from_all, gather_to, scatter_from_first
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("target", [0, 1])
def test_a_gather_to_any_rank_brings_every_row_there_and_nothing_elsewhere(target):
    own = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()
    rows = gather_to(own, dist.group.WORLD, "unit", target=target)
    if dist.get_rank() == target:
        assert rows.tolist() == [[1, 2], [11, 12]]
    else:
        assert rows is None


@on_ranks(2)
@pytest.mark.parametrize("name", ["int16", "uint16", "bool", "float8_e4m3fn"])
def test_gloo_moves_values_of_dtypes_that_it_cannot_add(name):
    rank, group, dtype = dist.get_rank(), dist.group.WORLD, getattr(torch, name)
    rows = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    own = rows[rank].clone()
    assert gather_from_all(own, group, label="unit").float().tolist() == [[0, 1], [1, 0]]
    gathered = gather_to(own, group, "unit")
    assert gathered is None if rank else gathered.float().tolist() == [[0, 1], [1, 0]]
    scatter_from_first(own, gathered, group, "unit")
    assert own.float().tolist() == [[0, 1], [1, 0]][rank]
    broadcast(own, group, label="unit")
    assert own.float().tolist() == [0, 1]
