"""Models that several threads run: one after the other, and one inside the step of another."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.against_plain import check_gradients
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks
from tests.support.sharding import shard_blocks

BATCHES = [torch.arange(12.0).view(2, 6) / 12 - shift for shift in (0.0, 0.5)]


def sharded():
    return shard_blocks(seeded(MlpStack()))


def loss_of(model, number=0):
    return model(BATCHES[number]).square().mean()


def train(model):
    loss_of(model).backward()


def in_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(60)


def check_trains(model, number):
    check_gradients(model, seeded(MlpStack()), lambda each, rank: loss_of(each, number), times=1)


@pytest.mark.parametrize("way", ["all", "forward", "backward", "evaluation"])
@on_fake_ranks(1)
def test_a_step_may_run_in_another_thread_than_the_last_one(way):
    model, plain = sharded(), seeded(MlpStack())
    train(model)
    model.zero_grad()
    if way == "evaluation":
        with torch.no_grad():
            model(BATCHES[0])
    if way == "forward":
        in_thread(loss_of, model).backward()
    elif way == "backward":
        in_thread(loss_of(model).backward)
    else:
        in_thread(train, model)
    train(plain)
    assert_same(full_grads(model), full_grads(plain))
    check_trains(model, 1)


def refused(function, *args):
    with pytest.raises(RuntimeError, match=r"another thread runs.*threading\.Lock"):
        in_thread(function, *args)
    return True


@pytest.mark.parametrize(
    ("inside", "what"),
    [("forward", "step"), ("backward", "step"), ("backward", "evaluation")],
)
@on_fake_ranks(1)
def test_a_step_inside_that_of_another_thread_is_refused_and_harms_nothing(inside, what):
    model, was_refused = sharded(), []
    actions = {
        "step": lambda: train(model),
        "evaluation": lambda: torch.no_grad()(model)(BATCHES[0]),
    }

    def act(*_):
        if not was_refused:
            was_refused.append(refused(actions[what]))

    def hook(module, args, output):
        act() if inside == "forward" else output.register_hook(act)

    model.blocks[1].up.register_forward_hook(hook)
    check_trains(model, 0)
    assert was_refused
    check_trains(model, 1)


@on_fake_ranks(1)
def test_the_refusal_of_another_model_inside_a_forward_cleans_that_forward_up():
    busy, other, seen = sharded(), sharded(), []

    def inside(*_):
        if not seen:
            seen.append(True)
            handle = other.blocks[0].register_forward_pre_hook(
                lambda *args: busy(BATCHES[0]) and None
            )
            seen.append(refused(other, BATCHES[0]))
            handle.remove()
            assert all(isinstance(param, DTensor) for param in other.parameters())

    busy.blocks[1].up.register_forward_hook(inside)
    check_trains(busy, 0)
    assert len(seen) == 2
    check_trains(other, 0)


@pytest.mark.parametrize("call", [lambda function: function(), in_thread])
@on_fake_ranks(1)
def test_a_backward_inside_a_forward_may_begin_with_a_reentrant_checkpoint(call):
    """On a device it runs on a thread of autograd, for which another thread stands in here."""

    def train_first_block(model, args):
        x = args[0].detach().requires_grad_()
        loss = checkpoint(model.blocks[0], x, use_reentrant=True).square().mean()
        call(loss.backward) if isinstance(model, meshard.FSDPModule) else loss.backward()

    model, plain = sharded(), seeded(MlpStack())
    for each in (model, plain):
        each.register_forward_pre_hook(train_first_block)
    check_gradients(model, plain, lambda each, rank: loss_of(each))


@on_fake_ranks(1)
def test_a_forward_that_the_refusal_of_another_thread_ends_has_ended_for_all_threads():
    model = sharded()
    handle = model.blocks[1].register_forward_hook(lambda *_: in_thread(loss_of, model))
    with pytest.raises(RuntimeError, match="another thread runs"):
        loss_of(model)
    handle.remove()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    in_thread(train, model)
    model.zero_grad()
    check_trains(model, 0)
