"""What users put into ``.grad`` of a replicated module or drop there, and who may step it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.integer_model import integer_batch, integer_loss
from tests.support.models import Ones
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import Pair


@on_ranks(2)
def test_a_gradient_that_is_left_when_a_parameter_is_frozen_is_kept():
    pair = Pair(bucket_cap_mb=25)
    pair.backward(0)
    for model in pair.both:
        model.blocks[1].linear.weight.requires_grad_(False)
    for number in (1, 2, 3):  # buckets are made anew, and what was accumulated is kept
        pair.backward(number)
        pair.compare()


@on_ranks(2)
def test_a_replaced_gradient_is_taken_over():
    pair = Pair()
    pair.steps(range(2))  # buckets are final
    pair.backward(0)
    for param in pair.ours.parameters():
        param.grad.detach_()  # some training loops do: it is the same tensor
    for model in pair.both:
        model.shift.grad = model.shift.grad * 2
        model.blocks[0].linear.bias.grad = None
    with pair.ours.no_sync():
        pair.backward(1)
        pair.backward(2)
    for number in (3, 4):
        pair.backward(number)
        pair.compare()


@on_ranks(2)
def test_a_gradient_of_an_earlier_step_may_come_back():
    pair = Pair()
    pair.steps(range(2))  # buckets are final
    pair.backward(2)
    earlier = {param: param.grad for model in pair.both for param in model.parameters()}
    pair.zero_grad()
    losses = [integer_loss(pair.ours(integer_batch(3, dist.get_rank())))]
    losses += [integer_loss(pair.plain(integer_batch(3, rank))) for rank in range(2)]
    for param, grad in earlier.items():
        param.grad = grad
    for loss in losses:
        loss.backward()
    pair.compare()


@on_ranks(2)
@pytest.mark.parametrize("replaces_ours", [False, True])
def test_a_sparse_gradient_of_the_user_is_added(replaces_ours):
    pair = Pair()
    for number in range(2):
        if replaces_ours:
            pair.backward(10 + number)
        for model in pair.both:
            model.shift.grad = torch.tensor([0.0, 3.0, 0.0, 1.0])
        pair.ours.shift.grad = pair.ours.shift.grad.to_sparse()
        pair.backward(number)
        pair.compare()
        pair.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float8_e4m3fn, torch.bfloat16])
def test_buffers_of_any_dtype_start_from_the_first_rank(dtype):
    model = nn.Linear(2, 2)
    value = torch.arange(6).view(2, 3) + dist.get_rank()
    model.register_buffer("table", value.to(dtype))
    model.register_buffer("scalar", torch.tensor(dist.get_rank()).to(dtype))
    meshard.replicate(model)
    assert torch.equal(model.table.float().flatten(), torch.arange(6).to(dtype).float())
    assert model.scalar.float() == 0


@on_ranks(2)
def test_an_expanded_buffer_is_named():
    model = nn.Linear(2, 2)
    model.register_buffer("ones", torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="buffer 'ones' is expanded"):
        meshard.replicate(model)
    assert type(model) is nn.Linear
    meshard.replicate(model, init_sync=False)


@on_threads(2)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("mode", [GradientSync.NONE, GradientSync.FULL])
def test_zero_grad_drops_gradients_and_setting_grad_to_none_those_that_are_there(mode, by_hand):
    model = meshard.replicate(Ones())
    with meshard.gradient_sync(model, mode):
        model(1.0).backward()
    if by_hand:
        model.a.grad = None
    else:
        model.zero_grad()
    model(10.0).backward()
    is_kept = by_hand and mode is GradientSync.NONE  # it is in the bucket, and not in .grad
    assert model.a.grad.tolist() == [11.0 if is_kept else 10.0] * 4
