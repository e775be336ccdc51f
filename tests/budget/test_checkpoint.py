"""How many collectives saves and loads take."""

import contextlib
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer
from tests.checkpoint.runs import net, train
from tests.support.ranks import on_ranks


def count(exchanges, name, call, *args, **kwargs):
    exchanges[name] += 1
    return call(*args, **kwargs)


@on_ranks(2)
def test_the_second_save_plans_nothing(tmp_path):
    model = net("fully_shard")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpointer = Checkpointer(tmp_path)
    exchanges = Counter()

    def save(step):
        exchanges.clear()
        with contextlib.ExitStack() as stack:
            for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
                counted = partial(count, exchanges, name, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, counted))
            checkpointer.save(step, model, optimizer)
        train(model, optimizer, 1)
        return exchanges.total()

    # Four times the ranks tell the first one, and it answers: on what to save, what differs, the
    # name of the folder, and the outcome. In the first save also on the plan.
    assert [save(step) for step in range(3)] == [8 + 2, 8, 8]
    model.gate.requires_grad_(True)
    train(model, optimizer, 1)
    assert save(4) == 8 + 2


@on_ranks(2)
def test_all_ranks_gather_again_what_a_load_has_filled(tmp_path):
    """Of a head of one row, the second rank has no element, so it reads nothing."""
    head = meshard.fully_shard(nn.Linear(4, 1), reshard_after_forward=False)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, head)
    with torch.no_grad():
        head(torch.ones(1, 4))
        checkpointer.load(head)
        with meshard.CommLedger(head) as ledger:
            head(torch.ones(1, 4))
    assert dict(ledger.counts) == {"all_gather": 1}
