"""Edits of unsharded parameters between ``unshard()`` and ``reshard()``."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger
from tests.support.against_plain import check_gradients, inputs_of, mean_square, sharded_and_plain
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads


def check_step(model, plain):
    check_gradients(model, plain, times=1)
    assert_same(full_state(model), full_state(plain))
    assert all(isinstance(param, DTensor) for param in model.parameters())


USES = {
    "reshard": lambda model: model.blocks[1].reshard(),
    "forward": lambda model: model(inputs_of(0)),
    "unshard": lambda model: model.blocks[1].unshard(),
}


@pytest.mark.parametrize("use", ["reshard", "forward", "unshard"])
@on_threads(2)
def test_flags_that_are_set_while_whole_by_hand_hold(use):
    model, plain = sharded_and_plain(MlpStack())
    for flag in (False, True):
        model.blocks[1].unshard()
        for each in (model, plain):
            each.blocks[1].up.requires_grad_(flag)
        USES[use](model)
        model.blocks[1].reshard()
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
        assert frozen == ([] if flag else ["blocks.1.up.weight", "blocks.1.up.bias"])
        check_step(model, plain)


@on_ranks(2)
def test_edits_that_are_lost_warn_once():
    model, plain = sharded_and_plain(MlpStack())
    for is_second in (False, True):
        model.blocks[1].unshard()
        with torch.no_grad():
            model.blocks[1].up.bias.fill_(3.0)
        text = r"'up.bias' of unit 'blocks.1' were edited .* are lost"
        with contextlib.nullcontext() if is_second else pytest.warns(UserWarning, match=text):
            model.blocks[1].reshard()
        check_step(model, plain)
    model.blocks[0].unshard()
    model.load_state_dict(plain.state_dict())  # into the shards as well: nothing is lost
    model.blocks[0].reshard()
    check_step(model, plain)


@pytest.mark.parametrize("is_async", [False, True])
@on_threads(2)
def test_flags_set_after_a_second_unshard_hold(is_async):
    model, plain = sharded_and_plain(MlpStack())
    for flag in (False, True):  # of one copy, which is never stale
        model.blocks[1].unshard(async_op=is_async and flag)
        model.blocks[1].up.requires_grad_(flag)
    model.blocks[1].reshard()
    assert model.blocks[1].up.weight.requires_grad
    check_step(model, plain)


@on_threads(2)
def test_a_late_wait_shows_nothing():
    """A handle that is waited for when nothing is left to wait for does nothing."""
    model, plain = sharded_and_plain(MlpStack())
    first, second = (model.unshard(async_op=True) for _ in range(2))
    first.wait()
    assert not isinstance(model.scale, DTensor)
    second.wait()
    handles = [first, second, model.blocks[1].unshard(async_op=True)]
    check_step(model, plain)
    handles.append(model.blocks[0].unshard(async_op=True))
    model.blocks[0].reshard()
    with CommLedger(model) as ledger:
        for handle in handles:
            handle.wait()
    assert ledger.counts == {}
    check_step(model, plain)  # of shards: zero_grad clears theirs


@on_threads(4, timeout=30)
def test_a_handle_may_be_waited_for_on_some_ranks_only():
    """A wait is no collective: what backward gathers, and among whom, must not depend on it."""
    model, plain = sharded_and_plain(MlpStack(), reshard_after_forward=2)
    for unit in (model.blocks[0], model):
        handle = unit.unshard(async_op=True)
        if dist.get_rank() == 0:
            handle.wait()
    for _ in range(2):
        check_step(model, plain)


@on_threads(2)
def test_gradients_are_clipped_and_cleared_while_a_unit_is_whole_by_hand():
    model, plain = sharded_and_plain(MlpStack())
    check_step(model, plain)
    for number, set_to_none in enumerate((True, False)):
        model.blocks[number].unshard()
        norms = [
            meshard.clip_grad_norm_(model, 0.1),
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
        ]
        assert_same(*norms)
        for each in (model, plain):
            each.zero_grad(set_to_none=set_to_none)
            each(inputs_of(0)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("after", ["nothing", "reshard", "a forward"])
@on_fake_ranks(1)
def test_a_graph_on_unsharded_weights_lasts_until_they_are_resharded(after):
    model, plain = sharded_and_plain(MlpStack())
    model.blocks[0].unshard()
    loss = model.blocks[0].up.weight.square().sum()
    if after == "nothing":
        loss.backward()
        model.blocks[0].reshard()
        plain.blocks[0].up.weight.square().sum().backward()
        assert_same(full_grads(model), full_grads(plain))
        return
    if after == "reshard":
        model.blocks[0].reshard()
    else:
        loss = loss + mean_square(model, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    check_gradients(model, plain)


@on_fake_ranks(1)
def test_a_reshard_by_hand_leaves_the_graph_of_an_earlier_forward_alone():
    def step(module, rank):
        loss = mean_square(module, rank)
        if module is model:
            model.blocks[0].unshard()
            model.blocks[0].reshard()
        return loss

    model, plain = sharded_and_plain(MlpStack())
    check_gradients(model, plain, step)


@on_fake_ranks(1)
def test_memory_of_a_gradient_that_the_user_holds_is_never_emptied():
    model, _ = sharded_and_plain(MlpStack())
    mean_square(model, 0).backward()
    held = [param.grad.to_local().untyped_storage() for param in model.parameters()]
    before = [bytes(storage) for storage in held]
    model.zero_grad()
    mean_square(model, 1).backward()
    assert [bytes(storage) for storage in held] == before


@on_fake_ranks(1)
def test_zero_grad_clears_a_gradient_that_was_set_by_hand_after_unshard():
    model, plain = sharded_and_plain(MlpStack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    weight.grad = torch.full_like(weight, 100.0)
    optimizer.zero_grad()
    assert weight.grad is None
    check_gradients(model, plain)


def edit_and_step(model, optimizer):
    with meshard.unsharded_params(model):
        model.weight.data.mul_(2.0)
        optimizer.step()


@on_threads(2)
def test_a_local_optimizer_steps_shards_inside_unsharded_params_as_the_ordinary_one():
    found = []
    for is_local in (True, False):
        model = meshard.fully_shard(seeded(nn.Linear(4, 4)))
        if is_local:
            optimizer = meshard.local_optimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        with meshard.unsharded_params(model, writeback=False):
            optimizer.step()
        optimizer.step()
        found.append(full_state(model))
        with pytest.raises(RuntimeError, match="were edited inside unsharded_params"):
            edit_and_step(model, optimizer)  # the step would be lost
    assert_same(*found, bitwise=True)


@on_threads(2)
def test_unshard_after_an_evaluation_leaves_the_graph_of_an_earlier_forward_alone():
    def step(model, rank):
        loss = mean_square(model, rank)
        with torch.no_grad():
            model(inputs_of(rank))
        for block in model.blocks if isinstance(model, meshard.FSDPModule) else ():
            block.unshard()
        model(inputs_of(rank, 1))
        return loss

    check_gradients(*sharded_and_plain(MlpStack(), reshard_after_forward=True), step)


@on_threads(2)
def test_a_forward_that_raises_ends_unshard():
    """The error for units that a pipeline schedule must keep unsharded is not for this one."""

    def forward(model, x):
        y = model.used(x)
        model.unused(x)
        return y

    members = {"used": nn.Linear(6, 6), "unused": nn.Linear(6, 6)}
    model, plain = sharded_and_plain(Made(forward, **members), members)
    model.unused.unshard()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(3, 5))

    def step(model, rank):
        if isinstance(model, meshard.FSDPModule):
            model.set_requires_gradient_sync(False)
        loss = mean_square(model, rank)
        loss.backward(retain_graph=True)
        if isinstance(model, meshard.FSDPModule):
            model.set_requires_gradient_sync(True)
        return loss

    check_gradients(model, plain, step, times=1)


@on_fake_ranks(2)
def test_a_warning_names_three_parameters_and_counts_the_others():
    for count, names in ((3, "'0', '1', '2'"), (5, "'0', '1', '2' and 2 more")):
        model = meshard.fully_shard(nn.ParameterList(torch.ones(2) for _ in range(count)))
        model.unshard()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        with pytest.warns(UserWarning, match=rf"^parameter\(s\) {names} of unit"):
            model.reshard()


@pytest.mark.parametrize("times", [1, 2])
@on_threads(2)
def test_gradients_are_cleared_after_unshard_that_nobody_waits_for(times):
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)), reshard_after_forward=False)
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    handles = [model.unshard(async_op=True) for _ in range(times)]
    model.zero_grad()
    for handle in handles:
        handle.wait()
    model.reshard()
    assert all(param.grad is None for param in model.parameters())
