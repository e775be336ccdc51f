"""Autograd calls on sharded parameters."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


def both(**kwargs):
    plain = seeded(MlpStack())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    shard_blocks(model, mesh, **kwargs)
    return model, plain


def batches():
    return torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


def backward(model, plain, **kwargs):
    xs = batches()
    model(xs[dist.get_rank()]).square().mean().backward(**kwargs)
    plain(xs.flatten(0, 1)).square().mean().backward(**kwargs)


@on_ranks(2)
def test_hooks_on_shards_run_on_reduced_gradients():
    model, plain = both()
    heard = []
    for each in (model, plain):
        name = "ours" if each is model else "theirs"
        each.scale.register_hook(lambda grad: 2 * grad)
        each.blocks[0].up.weight.register_hook(
            lambda grad, name=name: heard.append((name, "tensor", grad))
        )
        handle = each.blocks[1].up.bias.register_hook(lambda grad: 0 * grad)
        each.blocks[1].down.bias.register_hook(lambda grad: grad + 1)
        each.blocks[1].down.bias.register_hook(lambda grad: 3 * grad)
        each.blocks[2].down.bias.register_hook(lambda grad: (grad.mul_(5), None)[1])
        each.blocks[0].up.weight.register_post_accumulate_grad_hook(
            lambda param, name=name: heard.append((name, "post", param.grad.clone()))
        )
        each.removed = handle.remove
    backward(model, plain)
    assert_same(full_grads(model), full_grads(plain))
    backward(model, plain)  # added to what is there; the hook sees what is added
    assert_same(full_grads(model), full_grads(plain))
    ours = [(kind, grad) for name, kind, grad in heard if name == "ours"]
    theirs = [(kind, grad) for name, kind, grad in heard if name == "theirs"]
    assert [kind for kind, _ in ours] == [kind for kind, _ in theirs] == ["tensor", "post"] * 2
    for (_, our_grad), (_, their_grad) in zip(ours, theirs, strict=True):
        assert isinstance(our_grad, DTensor)
        assert_same(our_grad.full_tensor(), their_grad)
    for each in (model, plain):
        each.removed()
        each.zero_grad()
    backward(model, plain)
    assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_a_hook_runs_once_in_a_window():
    """In a window the hook runs once, on the sum."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, _ = both(mp_policy=policy)
    model.bfloat16()
    seen = []
    model.scale.register_hook(lambda grad: seen.append(grad.dtype) or 2 * grad)
    x = torch.ones(1, 6)
    grads = []
    for is_doubled in (False, True):
        for last in (False, True):
            model.set_gradient_sync(GradientSync.FULL if last else GradientSync.NONE)
            model(x).float().sum().backward()
        grads.append(model.scale.grad.full_tensor())
        model.zero_grad()
        if not is_doubled:
            model.scale._backward_hooks.clear()
    assert seen == [torch.bfloat16]
    assert_same(grads[0], 2 * grads[1], torch.bfloat16)


def twice_over_one_graph(reshard_after_forward):
    model, plain = both(reshard_after_forward=reshard_after_forward)
    xs = batches()
    for each, x in ((model, xs[dist.get_rank()]), (plain, xs.flatten(0, 1))):
        out = each(x)
        out.square().mean().backward(retain_graph=True)
        (out * 0.25).sum().div(out.numel()).backward(retain_graph=True)
        out.square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))
    with CommLedger(model) as ledger:
        loss = model(xs[0]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    return ledger.counts


def test_several_backwards_over_one_graph(run_ranks):
    # Each backward gathers and reduces; a root that forward kept is gathered again by the second.
    assert run_ranks(twice_over_one_graph, 2, None) == [{"all_gather": 11, "reduce_scatter": 8}] * 2
    assert run_ranks(twice_over_one_graph, 2, False) == [{"all_gather": 8, "reduce_scatter": 8}] * 2
