"""``Communicator.all_to_all``, by which owners of matrices get them and give them back."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard._communicators import make_communicator
from tests.support.ranks import on_ranks

# From rank (row) to rank (column): uneven, some empty.
SIZES = [[1, 0, 3], [2, 2, 0], [0, 0, 0]]


def exchange(comm, *, numel=8):
    rank, group = dist.get_rank(), dist.group.WORLD
    sent, received = SIZES[rank], [row[rank] for row in SIZES]
    source = torch.full((sum(sent),), float(rank))
    exchanging = comm.all_to_all(source, sent, received, numel=numel, group=group, label="(test)")
    exchanging.pending.wait()
    return exchanging.received


@on_ranks(3)
def test_each_rank_gets_what_the_others_have_for_it():
    column = [row[dist.get_rank()] for row in SIZES]
    received = exchange(make_communicator(torch.device("cpu")))
    assert received.tolist() == [float(r) for r, count in enumerate(column) for _ in range(count)]


@on_ranks(3)
def test_observers_see_what_all_send_and_what_this_rank_sends_to_others():
    with meshard.CommLedger() as ledger:
        exchange(make_communicator(torch.device("cpu")))
    (event,) = ledger.events
    assert (event.op, event.unit, event.payload_bytes) == ("all_to_all", "(test)", 8 * 4)
    assert event.wire_bytes == ledger.wire_bytes == 4 * [3, 2, 0][dist.get_rank()]


@on_ranks(3)
def test_ranks_that_exchange_different_things_are_refused_under_debug():
    with mock.patch.dict(os.environ, MESHARD_DEBUG="1"):
        comm = make_communicator(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="all_to_all"):
        exchange(comm, numel=8 + dist.get_rank())
