"""Edits of unsharded parameters between ``unshard()`` and ``reshard()``."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger
from tests.support.fake import fake_group
from tests.support.models import ChosenBlocks, MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

BATCHES = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


def both(reshard=None):
    plain = seeded(MlpStack())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_blocks(model, mesh, reshard_after_forward=reshard)
    return model, plain


def check_step(model, plain):
    for each, batch in ((model, BATCHES[dist.get_rank() % 2]), (plain, BATCHES.flatten(0, 1))):
        each.zero_grad()
        each(batch).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))
    assert_same(full_state(model), full_state(plain))
    assert all(isinstance(param, DTensor) for param in model.parameters())


CHANGES = {
    "cast": lambda layer: layer.to(torch.float64),
    "given other data": lambda layer: setattr(layer.weight, "data", torch.ones(10, 6)),
}
USES = {
    "reshard": lambda model: model.blocks[1].reshard(),
    "forward": lambda model: model(BATCHES[0]),
    "unshard": lambda model: model.blocks[1].unshard(),
    "to": lambda model: model.blocks[1].to(torch.float32),
}


@on_ranks(2)
def test_a_cast_of_a_part_that_is_whole_by_hand_is_refused():
    for change in CHANGES.values():
        for use in USES.values():
            model, plain = both()
            model.blocks[1].unshard()
            change(model.blocks[1].up)
            with pytest.raises(RuntimeError, match=r"'up.weight'.* of unit 'blocks.1' were cast, "):
                use(model)
            check_step(model, plain)  # nothing of it is left
            model.blocks[1].double(), plain.blocks[1].double()
            model.blocks[1].float(), plain.blocks[1].float()
            check_step(model, plain)


@on_ranks(2)
def test_flags_that_are_set_while_whole_by_hand_hold():
    for use in (USES["reshard"], USES["forward"], USES["unshard"]):
        model, plain = both()
        for flag in (False, True):
            model.blocks[1].unshard()
            for each in (model, plain):
                each.blocks[1].up.requires_grad_(flag)
            use(model)
            model.blocks[1].reshard()
            assert model.blocks[1].up.weight.requires_grad is flag
            check_step(model, plain)


@on_ranks(2)
def test_edits_that_are_lost_warn():
    model, plain = both()
    model.blocks[1].unshard()
    with torch.no_grad():
        model.blocks[1].up.bias.fill_(3.0)
    with pytest.warns(UserWarning, match=r"'up.bias' of unit 'blocks.1' were edited .* are lost"):
        model.blocks[1].reshard()
    check_step(model, plain)
    model.blocks[1].unshard()
    model.load_state_dict(plain.state_dict())  # into the shards as well: nothing is lost
    model.blocks[1].reshard()
    check_step(model, plain)


@on_ranks(2)
def test_a_second_unshard_after_a_step_watches_anew():
    model, plain = both()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    check_step(model, plain)
    model.blocks[1].unshard()
    model.blocks[1].down.requires_grad_(False)
    for optimizer in optimizers:
        optimizer.step()
    model.blocks[1].unshard()  # the copy was stale
    model.blocks[1].down.requires_grad_(True)
    with torch.no_grad():
        model.blocks[1].up.bias.fill_(3.0)
    with pytest.warns(UserWarning, match="'up.bias' of unit 'blocks.1' were edited .* are lost"):
        model.blocks[1].reshard()
    assert all(param.requires_grad for param in model.parameters())
    check_step(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_flags_set_after_a_second_unshard_hold(is_async):
    model, plain = both()
    for flag in (False, True):  # of one copy, which is never stale
        model.blocks[1].unshard(async_op=is_async and flag)
        model.blocks[1].up.requires_grad_(flag)
    model.blocks[1].reshard()
    assert model.blocks[1].up.weight.requires_grad
    check_step(model, plain)


@on_ranks(2)
def test_a_prefetched_unit_that_the_user_unshards_stays_unsharded():
    """The forward that has prefetched it does not run it, and would drop the gather."""
    model = shard_blocks(seeded(ChosenBlocks()))
    model(BATCHES[0])
    handles = []

    def unshard_the_last(*_):
        handles.append(model.blocks[2].unshard(async_op=True))

    removable = model.blocks[1].register_forward_hook(unshard_the_last)
    with CommLedger(model) as ledger:
        model(BATCHES[0], (0, 1))
        handles[0].wait()
    removable.remove()
    assert ledger.counts == {"all_gather": 3}
    assert not isinstance(model.blocks[2].up.weight, DTensor)
    model.blocks[2].reshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_a_late_wait_shows_nothing():
    """A handle that is waited for when nothing is left to wait for does nothing."""
    model, plain = both()
    handles = [model.unshard(async_op=True), model.blocks[1].unshard(async_op=True)]
    check_step(model, plain)
    given_back = model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()
    with CommLedger(model) as ledger:
        for handle in (*handles, given_back):
            handle.wait()
    assert ledger.counts == {}
    check_step(model, plain)  # of shards: zero_grad clears theirs


@on_ranks(4, timeout=30)
def test_a_handle_may_be_waited_for_on_some_ranks_only():
    """A wait is no collective: what backward gathers, and among whom, must not depend on it."""
    model, plain = both(reshard=2)
    for unit in (model.blocks[0], model):
        handle = unit.unshard(async_op=True)
        if dist.get_rank() == 0:
            handle.wait()
    for _ in range(2):
        check_step(model, plain)


def test_whoever_asked_first_may_wait_too():
    with fake_group(2):
        model, _ = both()
        first, second = (model.unshard(async_op=True) for _ in range(2))
        first.wait()
        assert not isinstance(model.scale, DTensor)
        second.wait()
        first.wait()
        model.reshard()
        assert isinstance(model.scale, DTensor)


@on_ranks(2)
def test_gradients_are_clipped_and_cleared_while_a_unit_is_whole_by_hand():
    model, plain = both()
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
            each(BATCHES[0]).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))


def check_alone(model, plain):
    for each in (model, plain):
        each.zero_grad()
        each(BATCHES[0]).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


def penalty_of(model):
    return model.blocks[0].up.weight.square().sum()


def test_a_graph_on_unsharded_weights_lasts_until_reshard():
    with fake_group(1):
        model, plain = both()
        model.blocks[0].unshard()
        penalty_of(model).backward()
        model.blocks[0].reshard()
        penalty_of(plain).backward()
        weight = model.blocks[0].up.weight
        assert_same(weight.grad.full_tensor(), plain.blocks[0].up.weight.grad)


def test_a_graph_on_unsharded_weights_raises_after_reshard():
    with fake_group(1):
        model, plain = both()
        model.blocks[0].unshard()
        penalty = penalty_of(model)
        model.blocks[0].reshard()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
        check_alone(model, plain)


def test_a_graph_on_unsharded_weights_raises_after_a_forward_that_reshards():
    with fake_group(1):
        model, plain = both()
        model.blocks[0].unshard()
        penalty = penalty_of(model)
        loss = model(BATCHES[0]).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + penalty).backward()
        check_alone(model, plain)


def test_a_reshard_by_hand_leaves_the_graph_of_an_earlier_forward_alone():
    with fake_group(1):
        model, plain = both()
        loss = model(BATCHES[0]).square().mean()
        model.blocks[0].unshard()
        model.blocks[0].reshard()
        loss.backward()
        plain(BATCHES[0]).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))


def test_memory_of_a_gradient_that_the_user_holds_is_never_emptied():
    with fake_group(1):
        model, _ = both()
        model(BATCHES[0]).square().mean().backward()
        held = [param.grad.to_local().untyped_storage() for param in model.parameters()]
        before = [bytes(storage) for storage in held]
        model.zero_grad()
        model(BATCHES[1]).square().mean().backward()
        assert [bytes(storage) for storage in held] == before


def test_zero_grad_clears_a_gradient_that_was_set_by_hand_after_unshard():
    with fake_group(1):
        model, plain = both()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.blocks[0].unshard()
        weight = model.blocks[0].up.weight
        weight.grad = torch.full_like(weight, 100.0)
        optimizer.zero_grad()
        assert weight.grad is None
        check_alone(model, plain)
