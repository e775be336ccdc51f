"""Roots: what makes them, what may come before their first use, and roots put under another one."""

import contextlib
import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support import insides
from tests.support.against_plain import check_training, sharded_and_plain
from tests.support.insides import unsharded_units
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import shard_blocks

BATCH = torch.arange(12.0).view(2, 6) / 12


def around(stack):
    """Return a module with a head behind ``stack``."""
    head = seeded(nn.Linear(6, 3), 1)
    return Made(lambda m, x: m.head(m.stack(x)), stack=stack, head=head)


def sharded():
    return shard_blocks(seeded(MlpStack()))


def train(model):
    model(BATCH).square().sum().backward()


def check(model, plain):
    """Train both, and compare all gradients since the last time that they were cleared."""
    for each in (model, plain):
        train(each)
    assert_same(full_grads(model), full_grads(plain))


@on_fake_ranks(2)
def test_two_threads_that_come_first_get_one_lifecycle(monkeypatch):
    made = []

    def make_slowly(usual):
        made.append(usual())
        time.sleep(0.1)
        return made[-1]

    insides.use_communicator(monkeypatch, make_slowly)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda unit: unit.lifecycle, insides.units(sharded())))
    assert len(set(found)) == len(made) == 1


@on_ranks(2)
@pytest.mark.parametrize("is_checked", ["0", "1"])
def test_what_one_rank_makes_alone_before_the_first_use_takes_no_name(is_checked):
    """Names differ if it did, which the check of collectives would report."""
    os.environ["MESHARD_DEBUG"] = is_checked
    try:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
        first = shard_blocks(seeded(MlpStack()), mesh["all"])
        kept = []
        if dist.get_rank() == 0:
            kept = [copy.deepcopy(first), shard_blocks(seeded(MlpStack()), mesh["alone"])]
            train(kept[1])
        second = shard_blocks(seeded(MlpStack()), mesh["all"])
        for model in (second, first, copy.deepcopy(second), *kept[1:]):
            model.zero_grad()
            train(model)
        grads = full_grads(first)
        assert_same(grads, full_grads(second), bitwise=True)
        for model in kept[1:]:
            assert_same(full_grads(model), grads)
    finally:
        del os.environ["MESHARD_DEBUG"]


def clip_and_step_local(model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    meshard.clip_grad_norm_(model, 1.0)
    meshard.local_optimizer(model, torch.optim.SGD, lr=0.1).step()
    model.zero_grad()


def unshard_and_reshard(model):
    model.blocks[0].unshard()
    assert model.blocks[0].up.weight.shape == (10, 6)
    model.blocks[0].reshard()


def use_other_collectives(model):
    model.set_custom_all_reduce(None)
    model.set_separate_reduce_scatter_group()
    meshard.share_comm_ctx([model, sharded()])


def record(model):
    with meshard.CommLedger(model.blocks[0]):
        assert "blocks.0" in meshard.describe(model)


CALLS = {
    "step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "clip and step local": clip_and_step_local,
    "unshard and reshard": unshard_and_reshard,
    "offload and onload": lambda model: (meshard.offload(model), meshard.onload(model)),
    "use other collectives": use_other_collectives,
    "record": record,
    "copy": copy.deepcopy,
    "pending_gradients": meshard.pending_gradients,
    "finalize_gradients": meshard.finalize_gradients,
    "state_dict": lambda model: model.state_dict(),
    "reset_iter_state": lambda model: model.reset_iter_state(),
}


@pytest.mark.parametrize("call", CALLS)
@on_threads(2)
def test_a_call_before_the_first_forward(call):
    for is_around in (False, True):
        model, plain = sharded(), seeded(MlpStack())
        CALLS[call](model)
        if is_around:
            model, plain = meshard.fully_shard(around(model)), around(plain)
        check(model, plain)


def collectives_of_a_step(model, is_manual):
    model.set_manual_backward_finalization(is_manual)
    with meshard.CommLedger(model) as ledger:
        train(model)
        if is_manual:
            model.finalize_backward()
    return [(event.op, event.unit) for event in ledger.events]


def evaluate(stack):
    with torch.no_grad():
        stack(BATCH)


def call_a_part(stack):
    train(stack.blocks[0])


def leave_reductions_in_flight(stack):
    set_flag = getattr(stack, "set_is_last_backward", lambda flag: None)
    set_flag(False)
    train(stack)
    set_flag(True)


def leave_gradients_pending(stack):
    is_sharded = isinstance(stack, meshard.FSDPModule)
    with meshard.no_sync(stack) if is_sharded else contextlib.nullcontext():
        train(stack)


def leave_a_part_unsharded(stack):
    evaluate(stack)
    if isinstance(stack, meshard.FSDPModule):
        stack.blocks[1].unshard()


def keep_a_graph(stack):
    stack.graph = stack(BATCH).sum()


def raise_in_backward(stack):
    if isinstance(stack, meshard.FSDPModule):
        output = stack.blocks[0](BATCH)
        output.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stack.blocks[1](output).sum().backward()


USES = [
    evaluate,
    train,
    call_a_part,
    leave_reductions_in_flight,
    leave_gradients_pending,
    leave_a_part_unsharded,
    keep_a_graph,
    raise_in_backward,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("is_manual", [False, True])
@on_threads(2)
def test_a_unit_around_a_root_that_was_used(use, is_manual):
    stack, plain = sharded(), seeded(MlpStack())
    stack.set_manual_backward_finalization(is_manual)
    for each in (stack, plain):
        use(each)
    model, plain = meshard.fully_shard(around(stack)), around(plain)
    assert len({unit.root for unit in insides.units(model)}) == 1
    assert insides.labels(model)[:3] == ["(root)", "stack", "stack.blocks.0"]
    train(plain)
    collectives = collectives_of_a_step(model, is_manual)
    assert_same(full_grads(model), full_grads(plain))
    expected = collectives_of_a_step(meshard.fully_shard(around(sharded())), is_manual)
    if use is leave_a_part_unsharded:
        expected.remove(("all_gather", "stack.blocks.1"))
    assert collectives == expected


@on_threads(2)
def test_a_backward_that_is_not_the_last_stays_so_under_a_new_root():
    stack, plain = sharded(), around(seeded(MlpStack()))
    stack.set_is_last_backward(False)
    model = meshard.fully_shard(around(stack))
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    train(model)
    train(plain)
    check(model, plain)  # nothing was stepped
    optimizer.step()


@on_threads(2)
def test_a_graph_from_before_keeps_no_pending_gradient_back():
    """Its backward may still come as far as the old root knows, and the new root does not."""
    model, plain = (around(seeded(MlpStack())) for _ in range(2))
    shard_blocks(model.stack)
    meshard.fully_shard(model.head)
    for each in (model, plain):
        leave_gradients_pending(each.stack)
        keep_a_graph(each.stack)
    meshard.fully_shard(model)
    for each in (model, plain):
        train(each.head)
    assert_same(full_grads(model), full_grads(plain))


@on_threads(2)
def test_prefetch_lists_leave_out_units_of_another_root():
    encoder, plain = sharded_and_plain(MlpStack())
    decoder, _ = sharded_and_plain(MlpStack())
    encoder.blocks[2].set_modules_to_forward_prefetch([decoder.blocks[0]])
    encoder.blocks[0].set_modules_to_backward_prefetch([decoder.blocks[0]])
    check_training(encoder, plain)
    assert unsharded_units(decoder) == []
