"""Unusual uses of autograd: units stay right, and are gathered no more than needed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger
from tests.support.models import MlpBlock, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


class CheckpointedOutside(MlpStack):
    """Each unit is recomputed as a whole."""

    use_reentrant = False

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x + self.shift


class CheckpointedInside(MlpStack):
    """What is inside each unit is recomputed."""

    use_reentrant = False

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, run=block.forward: checkpoint(
                run, x, use_reentrant=self.use_reentrant
            )


def shard(model, mesh):
    return shard_blocks(model, mesh)


def checkpointed(model_class, use_reentrant):
    mesh = init_device_mesh("cpu", (2,))
    plain = seeded(MlpStack())
    model = seeded(model_class())
    model.use_reentrant = use_reentrant
    shard(model, mesh)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        with CommLedger(model) as ledger:
            model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
    return ledger.counts


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_class", [CheckpointedOutside, CheckpointedInside])
def test_checkpointing_costs_no_gather_more(run_ranks, model_class, use_reentrant):
    counts = run_ranks(checkpointed, 2, model_class, use_reentrant)
    assert counts == [{"all_gather": 7, "reduce_scatter": 4}] * 2


class Twice(nn.Module):
    """One unit, used at two places."""

    def __init__(self):
        super().__init__()
        self.block = MlpBlock(5, 7)
        self.between = nn.Linear(5, 5)

    def forward(self, x):
        return self.block(self.between(self.block(x)))


@on_ranks(2)
def test_a_unit_used_twice_is_reduced_once():
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(Twice())
    plain = copy.deepcopy(model)
    for unit in (model.block, model.between, model):
        meshard.fully_shard(unit, mesh)
    xs = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        with CommLedger(model) as ledger:
            model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
    assert ledger.counts["reduce_scatter"] == 2


@on_ranks(2)
def test_forwards_and_backwards_need_not_alternate():
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(MlpStack())
    plain = copy.deepcopy(model)
    shard(model, mesh)
    xs = torch.randn(2, 2, 3, 6, generator=torch.Generator().manual_seed(0))
    for order in ((0, 1), (1, 0)):
        losses = [model(x[dist.get_rank()]).square().mean() for x in xs]
        for place in order:
            losses[place].backward()
        for x in xs:
            plain(x.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
    loss = sum(model(x[dist.get_rank()]).square().mean() for x in xs)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        for x in xs:
            plain(x.flatten(0, 1)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


class Skipping(nn.Module):
    """Hands its input on when told to: layer drop."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(MlpBlock(6, 8) for _ in range(3))

    def forward(self, x, dropped):
        x = self.inlet(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number not in dropped else self.skip(block, x)
        return x

    def skip(self, block, x):
        block.is_dropped = True
        try:
            return block(x)
        finally:
            block.is_dropped = False


class DroppableBlock(MlpBlock):
    is_dropped = False

    def forward(self, x):
        return x if self.is_dropped else super().forward(x)


@on_ranks(2)
def test_ranks_may_drop_different_layers():
    mesh = init_device_mesh("cpu", (2,))
    model = Skipping()
    model.blocks = nn.ModuleList(DroppableBlock(6, 8) for _ in range(3))
    seeded(model)
    plain = copy.deepcopy(model)
    shard(model, mesh)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for drops in (((), (1,)), ((0, 1, 2), ()), ((2,), (0,)), ((1,), (1,))):
        model.zero_grad()
        plain.zero_grad()
        model(xs[dist.get_rank()], drops[dist.get_rank()]).square().mean().backward()
        for x, drop in zip(xs, drops, strict=True):
            (plain(x, drop).square().mean() / 2).backward()
        assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_training_follows_inference_mode():
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(MlpStack())
    plain = copy.deepcopy(model)
    shard(model, mesh)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert_same(model(xs[0]).clone(), plain(xs[0]).clone())
    model.blocks[1](xs[0])  # a unit by itself, before its parent
    model(xs[dist.get_rank()]).square().mean().backward()
    plain(xs.flatten(0, 1)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


def order_around_compute(forward):
    """Return what is gathered and computed, in order, with prefetch lists set against nature."""
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(MlpStack())
    shard(model, mesh)
    blocks, log = list(model.blocks), []
    if forward:
        blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
    else:
        blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[1]])

    class Log(CommLedger):
        def _observe(self, event, group, communicator):
            log.append(event.unit)

    def computes(*_):
        log.append("compute")

    blocks[0].up.register_forward_pre_hook(computes)
    if forward:
        with Log():
            model(torch.ones(1, 6))
    else:
        out = model(torch.ones(1, 6))
        with Log():
            out.sum().backward()
    return log


def test_prefetch_lists_replace_the_prediction(run_ranks):
    expected = ["(root)", "blocks.0", "blocks.2", "blocks.1", "compute"]
    assert run_ranks(order_around_compute, 2, True) == [expected] * 2
    for order in run_ranks(order_around_compute, 2, False):
        gathers = [name for name in order if name.startswith("blocks")][:3]
        assert gathers == ["blocks.2", "blocks.0", "blocks.1"]


@on_ranks(2)
def test_units_may_run_before_their_root_is_sharded():
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(MlpStack())
    plain = copy.deepcopy(model)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for block in model.blocks:
        meshard.fully_shard(block, mesh)
        block(xs[0])  # before there is a root
    meshard.fully_shard(model, mesh)
    model(xs[dist.get_rank()]).square().mean().backward()
    plain(xs.flatten(0, 1)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


class Branches(nn.Module):
    """Outputs of units in the middle may go unused."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6 + number) for number in range(4))

    def forward(self, x, used):
        outputs = [block(x).sum() for block in self.blocks]
        return sum(out for number, out in enumerate(outputs) if number in used)


def leave_outputs_unused(useds):
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(Branches())
    plain = copy.deepcopy(model)
    shard(model, mesh)
    # That ranks gather alike in backward is up to them; that they reduce alike is up to us.
    model.set_reshard_after_forward(False)
    x = torch.ones(2, 6)
    for _ in range(2):
        with CommLedger(model) as ledger:
            model(x, useds[dist.get_rank()]).backward()
        for used in useds:
            (plain(x, used) / 2).backward()
        assert_same(full_grads(model), full_grads(plain))
    return [event.unit for event in ledger.events if event.op == "reduce_scatter"]


@pytest.mark.parametrize(
    "useds", [((0, 1, 2, 3), (0, 1, 3)), ((0, 2), (1, 3)), ((3,), (0,)), ((0, 3), (0, 1, 2))]
)
def test_ranks_may_leave_different_outputs_unused(run_ranks, useds):
    orders = run_ranks(leave_outputs_unused, 2, useds)
    assert orders[0] == orders[1]


@on_ranks(2)
def test_a_keyboard_interrupt_is_forgotten_at_the_next_forward():
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(MlpStack())
    plain = copy.deepcopy(model)
    shard(model, mesh)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(xs[0])
    handle.remove()
    for _ in range(3):
        model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
    assert len(vars(model)["_meshard_unit"].lifecycle.schedule.current.units) == 4
