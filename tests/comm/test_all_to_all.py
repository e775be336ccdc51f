"""``Communicator.all_to_all``, by which owners of matrices get them and give them back."""

import torch
import torch.distributed as dist

import meshard
from meshard._communicators import make_communicator
from tests.support.ranks import on_ranks

# From rank (row) to rank (column): uneven, some empty.
SIZES = [[1, 0, 3], [2, 2, 0], [0, 0, 0]]


def exchange():
    rank, group = dist.get_rank(), dist.group.WORLD
    comm = make_communicator(torch.device("cpu"))
    sent, received = SIZES[rank], [row[rank] for row in SIZES]
    source = torch.full((sum(sent),), float(rank))
    exchanging = comm.all_to_all(source, sent, received, numel=8, group=group, label="(test)")
    exchanging.wait()
    return exchanging.result


@on_ranks(3)
def test_each_rank_gets_what_the_others_have_for_it():
    column = [row[dist.get_rank()] for row in SIZES]
    received = exchange()
    assert received.tolist() == [float(r) for r, count in enumerate(column) for _ in range(count)]


@on_ranks(3)
def test_observers_see_what_all_send_and_what_this_rank_sends_to_others():
    with meshard.CommLedger() as ledger:
        exchange()
    (event,) = ledger.events
    assert (event.op, event.unit, event.payload_bytes) == ("all_to_all", "(test)", 8 * 4)
    assert event.wire_bytes == ledger.wire_bytes == 4 * [3, 2, 0][dist.get_rank()]
