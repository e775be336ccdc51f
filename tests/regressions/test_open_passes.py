"""Several forwards, whose backwards come in any order, alone or several at once."""

import pytest
from torch import nn

from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made, MlpStack
from tests.support.ranks import on_threads


@pytest.mark.parametrize("runs", [[[0], [1], [2]], [[2], [0, 1]], [[0], [1, 2]]])
@on_threads(2)
def test_each_backward_reduces_a_unit_once(runs):
    model, plain = sharded_and_plain(MlpStack(depth=1))

    def step(model, rank):
        losses = [model(inputs_of(rank, number)).square().mean() for number in range(3)]
        for run in runs:
            sum(losses[number] for number in run).backward()

    ledger = check_gradients(model, plain, step)
    assert ledger.counts["reduce_scatter"] == 2 * len(runs)  # of the block, and of the root


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@on_threads(2)
def test_a_loss_may_read_kept_weights_in_any_order(order):
    layers = {"body": nn.Linear(6, 6), "head": nn.Linear(6, 6, bias=False)}
    plain = Made(lambda m, x: m.head(m.body(x)), **layers)
    model, plain = sharded_and_plain(plain, ("body", "head"), reshard_after_forward=False)

    def step(model, rank):
        outs = [model(inputs_of(rank, number)) for number in range(3)]
        losses = [(out @ model.head.weight).square().mean() for out in outs]
        for number in order:
            losses[number].backward()

    check_gradients(model, plain, step)
