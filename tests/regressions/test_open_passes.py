"""Several forwards, whose backwards come in any order, alone or several at once."""

import pytest
import torch
from torch import nn

import meshard
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


@on_threads(2)
def test_a_forward_that_has_called_a_backward_awaits_its_own():
    def forward(m, x):
        with torch.enable_grad():
            m.block(x.detach()).square().mean().backward()
        return m.head(torch.tanh(m.body(x)))

    layers = {"block": nn.Linear(6, 6), "body": nn.Linear(6, 6), "head": nn.Linear(6, 6)}
    model, plain = sharded_and_plain(
        Made(forward, **layers), ("block",), reshard_after_forward=True
    )

    def step(model, rank):
        out = model(inputs_of(rank, 0))
        if model is not plain:
            model.unshard()
        other = model(inputs_of(rank, 1))  # gives back what unshard() has taken
        (out.square().mean() + other.square().mean()).backward()

    check_gradients(model, plain, step)


@on_threads(2)
def test_a_unit_of_very_many_passes_is_reduced_once():
    """As of a recurrent model whose cell is the root."""
    cell = nn.Linear(1, 1, bias=False)
    nn.init.ones_(cell.weight)
    model, h = meshard.fully_shard(cell), torch.ones(1, 1)
    for _ in range(1500):
        h = model(h)
    with meshard.CommLedger(model) as ledger:
        h.sum().backward()
    assert ledger.counts["reduce_scatter"] == 1
    assert model.weight.grad.full_tensor().item() == 1500
