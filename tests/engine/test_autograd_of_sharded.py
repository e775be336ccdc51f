"""Autograd calls on sharded parameters: hooks, kept graphs, penalties."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from meshard import GradientSync
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import Made, MlpStack
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_threads


@on_threads(2)
def test_hooks_on_shards_run_on_reduced_gradients():
    model, plain = sharded_and_plain(MlpStack())
    heard, removable = {model: [], plain: []}, []
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

    def check():
        model(inputs_of(dist.get_rank())).square().mean().backward()
        plain(torch.cat([inputs_of(0), inputs_of(1)])).square().mean().backward()
        ours, theirs = (dict(each.named_parameters()) for each in (model, plain))
        for name, param in theirs.items():
            assert_same(ours[name].grad.full_tensor(), param.grad, what=name)

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
@pytest.mark.parametrize(("reshard", "gathers"), [(None, 15), (False, 12)])
@on_threads(2)
def test_several_backwards_over_one_graph(reshard, gathers):
    def step(model, rank):
        out = model(inputs_of(rank))
        out.square().mean().backward(retain_graph=True)
        (out * 0.25).sum().div(out.numel()).backward(retain_graph=True)
        return out.square().mean()

    pair = sharded_and_plain(MlpStack(), reshard_after_forward=reshard)
    ledger = check_gradients(*pair, step)
    assert ledger.counts == {"all_gather": gathers, "reduce_scatter": 12}


@pytest.mark.parametrize("place", ["on shards", "on whole parameters"])
@on_threads(2)
def test_a_penalty_on_weights(place):
    def step(model, rank):
        is_unsharded = place != "on shards" and isinstance(model, meshard.FSDPModule)
        with meshard.unsharded_params(model) if is_unsharded else contextlib.nullcontext():
            penalty = model[1].weight.square().sum()
            penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
            (model(inputs_of(rank)).square().mean() + 0.1 * penalty).backward()

    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    check_training(*sharded_and_plain(plain, ("0", "1")), step)


@on_fake_ranks(2)
def test_a_penalty_that_is_a_dtensor_is_explained():
    plain = Made(lambda m, x: m.layer(x).square().mean(), layer=nn.Linear(6, 3))
    model, _ = sharded_and_plain(plain, ("layer",))
    penalty = sum(param.square().sum() for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"output of unit '\(root\)', an .*full_tensor\(\)"):
        (model(torch.ones(4, 6)) + 0.1 * penalty).backward()
