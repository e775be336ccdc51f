"""How many collectives saves and loads take."""

import torch
from torch import nn

import meshard
from meshard import CommLedger
from meshard.checkpoint import Checkpointer
from tests.checkpoint.runs import net, train
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_the_second_save_plans_nothing(tmp_path):
    model = net("fully_shard")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpointer = Checkpointer(tmp_path)
    counts = []
    for step in range(3):
        with CommLedger() as ledger:
            checkpointer.save(step, model, optimizer)
        counts.append(len(ledger.events))
        train(model, optimizer, 1)
    # Each exchange is of sizes, then of what is that long: an agreement, the name of the folder,
    # the checksums, the outcome. The first save also gathers what ranks hold, and sends the plan.
    assert counts == [8 + 4, 8, 8]
    model.gate.requires_grad_(True)
    train(model, optimizer, 1)
    with CommLedger() as ledger:
        checkpointer.save(4, model, optimizer)
    assert len(ledger.events) == 8 + 4


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
