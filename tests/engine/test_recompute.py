"""Units that run more than once, not at all, or in another order than the last time."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.against_plain import (
    check_gradients,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import Made, MlpBlock, MlpStack, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_threads


@on_threads(2)
def test_a_unit_used_twice_is_reduced_once():
    plain = Made(
        lambda m, x: m.block(m.between(m.block(x))),
        block=MlpBlock(6, 7),
        between=nn.Linear(6, 6),
    )
    ledger = check_gradients(*sharded_and_plain(plain, ("block", "between")), times=3)
    assert ledger.counts["reduce_scatter"] == 2


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


@on_threads(2)
def test_training_follows_inference_mode():
    model, plain = sharded_and_plain(MlpStack())
    with torch.inference_mode():
        assert_same(model(inputs_of(0)).clone(), plain(inputs_of(0)).clone())
    model.blocks[1](inputs_of(0))  # a unit by itself, before its parent
    check_gradients(model, plain)


@pytest.mark.parametrize("is_forward", [True, False])
@on_fake_ranks(2)
def test_prefetch_lists_replace_the_prediction(is_forward):
    model, _ = sharded_and_plain(MlpStack())
    blocks, log = list(model.blocks), []

    class Log(CommLedger):
        def _observe(self, event, group, communicator):
            log.append(event.unit)

    blocks[0].up.register_forward_pre_hook(lambda *_: log.append("compute"))
    if is_forward:
        blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
        with Log():
            model(torch.ones(1, 6))
        assert log == ["(root)", "blocks.0", "blocks.2", "blocks.1", "compute"]
    else:
        blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[1]])
        out = model(torch.ones(1, 6))
        log.clear()
        with Log():
            out.sum().backward()
        gathers = [name for name in log if name.startswith("blocks")][:3]
        assert gathers == ["blocks.2", "blocks.0", "blocks.1"]


@on_threads(2)
def test_units_may_run_before_their_root_is_sharded():
    plain = seeded(MlpStack())
    model, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        meshard.fully_shard(block, mesh)
        block(inputs_of(0))
    check_gradients(meshard.fully_shard(model, mesh), plain)


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
