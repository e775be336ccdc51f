"""Blocking collectives with one rank at the end of them."""

import pytest
import torch
import torch.distributed as dist

from meshard._comm.blocking import gather_to
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
