"""Autograd calls on sharded parameters: hooks, kept graphs, penalties."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    mean_square,
    sharded_and_plain,
)
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_threads


@on_threads(2)
def test_hooks_on_shards_run_on_reduced_gradients():
    model, plain = sharded_and_plain(MlpStack())
    heard = {model: [], plain: []}
    removable = []
    for each in (model, plain):
        weight = each.blocks[0].up.weight
        each.scale.register_hook(lambda grad: 2 * grad)
        weight.register_hook(lambda grad, own=heard[each]: own.append(("tensor", grad)))
        removable.append(each.blocks[1].up.bias.register_hook(lambda grad: 0 * grad))
        each.blocks[1].down.bias.register_hook(lambda grad: grad + 1)
        each.blocks[1].down.bias.register_hook(lambda grad: 3 * grad)
        each.blocks[2].down.bias.register_hook(lambda grad: (grad.mul_(5), None)[1])
        weight.register_post_accumulate_grad_hook(
            lambda param, own=heard[each]: own.append(("post", param.grad.clone()))
        )

    def whole_batch(each, rank):
        xs = inputs_of(rank) if each is model else torch.cat([inputs_of(0), inputs_of(1)])
        return each(xs).square().mean()

    def check():
        whole_batch(model, dist.get_rank()).backward()
        whole_batch(plain, None).backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(param.grad.full_tensor(), other.grad, what=name)

    check()
    check()  # added to what is there; the hook sees what is added
    assert [kind for kind, _ in heard[model]] == ["tensor", "post"] * 2
    for (kind, ours), (other_kind, theirs) in zip(heard[model], heard[plain], strict=True):
        assert kind == other_kind and isinstance(ours, DTensor)
        assert_same(ours.full_tensor(), theirs, what=kind)
    for handle in removable:
        handle.remove()
    for each in (model, plain):
        each.zero_grad()
    check()


@on_threads(2)
def test_a_hook_runs_once_in_a_window():
    """In a window the hook runs once, on the sum."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded_and_plain(MlpStack(), mp_policy=policy)[0].bfloat16()
    seen, grads = [], []
    model.scale.register_hook(lambda grad: seen.append(grad.dtype) or 2 * grad)
    for _ in range(2):
        for sync in (GradientSync.NONE, GradientSync.FULL):
            model.set_gradient_sync(sync)
            model(torch.ones(1, 6)).float().sum().backward()
        grads.append(model.scale.grad.full_tensor())
        model.zero_grad()
        model.scale._backward_hooks.clear()
    assert seen == [torch.bfloat16]
    assert_same(grads[0], 2 * grads[1], torch.bfloat16)


# Each backward gathers and reduces; a root that forward kept is gathered again by the second.
@pytest.mark.parametrize(("reshard", "gathers"), [(None, 11), (False, 8)])
@on_threads(2)
def test_several_backwards_over_one_graph(reshard, gathers):
    def step(model, rank):
        out = model(inputs_of(rank))
        out.square().mean().backward(retain_graph=True)
        (out * 0.25).sum().div(out.numel()).backward(retain_graph=True)
        return out.square().mean()

    model, plain = sharded_and_plain(MlpStack(), reshard_after_forward=reshard)
    check_gradients(model, plain, step, times=1)
    with CommLedger(model) as ledger:
        loss = mean_square(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
    assert ledger.counts == {"all_gather": gathers, "reduce_scatter": 8}


def small_net():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("place", ["on shards", "on whole parameters"])
@on_threads(2)
def test_a_penalty_on_weights(place):
    def step(model, rank):
        penalty = model[2].weight.square().sum()
        penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
        loss = model(inputs_of(rank)).square().mean() + 0.1 * penalty
        loss.backward()

    def inside(model, rank):
        if not isinstance(model, meshard.FSDPModule):
            return step(model, rank)
        with meshard.unsharded_params(model):
            return step(model, rank)

    check_training(
        *sharded_and_plain(small_net(), ("0", "2")), step if place == "on shards" else inside
    )


class WithLoss(nn.Sequential):
    """Returns the loss, as models of transformers do."""

    def forward(self, x):
        return super().forward(x).square().mean()


@on_fake_ranks(2)
def test_a_penalty_that_is_a_dtensor_is_explained():
    model = seeded(WithLoss(*small_net()))
    for unit in (model[0], model[2], model):
        meshard.fully_shard(unit)
    penalty = sum(param.square().sum() for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"output of unit '\(root\)', an .*full_tensor\(\)"):
        (model(torch.ones(4, 6)) + 0.1 * penalty).backward()
