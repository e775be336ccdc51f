"""Units that run more than once, not at all, or in another order than the last time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made, MlpBlock, MlpStack
from tests.support.ranks import on_threads


@pytest.mark.parametrize("order", ["forwards", "backwards", "sum, twice"])
@on_threads(2)
def test_forwards_and_backwards_need_not_alternate(order):
    def step(model, rank):
        losses = [model(inputs_of(rank, number)).square().mean() for number in range(2)]
        if order == "sum, twice":
            sum(losses).backward(retain_graph=True)
            return sum(losses)
        for loss in losses if order == "forwards" else reversed(losses):
            loss.backward()
        return None

    check_gradients(*sharded_and_plain(MlpStack()), step)


@on_threads(2)
def test_ranks_may_drop_different_layers():
    """Each layer is called, and hands its input on when told to."""

    def forward(model, x, dropped):
        x = model.inlet(x)
        for number, block in enumerate(model.blocks):
            x = block(x, number in dropped)
        return x

    blocks = [
        Made(lambda m, x, is_dropped: x if is_dropped else m.inner(x), inner=MlpBlock(6, 8))
        for _ in range(3)
    ]
    model, plain = sharded_and_plain(Made(forward, inlet=nn.Linear(6, 6), blocks=blocks))
    for drops in (((), (1,)), ((0, 1, 2), ()), ((2,), (0,)), ((1,), (1,))):
        check_gradients(
            model,
            plain,
            lambda model, rank, drops=drops: model(inputs_of(rank), drops[rank]).square().mean(),
            what=f"{drops}: gradient",
        )


@pytest.mark.parametrize(
    "useds", [((0, 1, 2, 3), (0, 1, 3)), ((0, 2), (1, 3)), ((3,), (0,)), ((0, 3), (0, 1, 2))]
)
@on_threads(2)
def test_ranks_may_leave_different_outputs_unused(useds):
    # That ranks gather alike in backward is up to them; that they reduce alike is up to us.
    def forward(model, x, used):
        outputs = [block(x).sum() for block in model.blocks]
        return sum(outputs[number] for number in used)

    plain = Made(forward, blocks=[nn.Linear(6, 6 + number) for number in range(4)])
    pair = sharded_and_plain(plain, reshard_after_forward=False)
    ledger = check_gradients(*pair, lambda model, rank: model(inputs_of(rank), useds[rank]))
    own = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    orders = [None, None]
    dist.all_gather_object(orders, own)
    assert orders[0] == orders[1]


@on_threads(2)
def test_ranks_may_leave_different_units_unused_in_a_backward_inside_a_forward():
    """Inside the forward of a root runs the backward of its forward before."""

    def forward(model, x, used, loss_before=None):
        if loss_before is not None:
            loss_before.backward()
        return [block(x * model.scale) for block in model.blocks][used]

    def step(model, rank):
        loss = model(inputs_of(rank), rank).square().mean()
        return model(inputs_of(rank, 1), 0, loss).square().mean()

    blocks = [nn.Linear(6, 6), nn.Linear(6, 6)]
    plain = Made(forward, scale=nn.Parameter(torch.empty(6)), blocks=blocks)
    check_gradients(*sharded_and_plain(plain), step)
