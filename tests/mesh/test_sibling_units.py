"""Sibling units: a module with parameters on several meshes behaves as one unit."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import meshard
from meshard import GradientSync, MixedPrecisionPolicy, ShardPlacementResult
from tests.mesh.expert_meshes import batch_of, block, build, meshes, shard
from tests.support import insides
from tests.support.against_plain import check_gradients, check_training
from tests.support.models import seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_threads


def same_on_all(model, rank):
    return model(batch_of(0)).square().mean()


@on_threads(4)
def test_calls_on_a_module_reach_all_of_its_units():
    model = shard(build(), "flat")
    block = model.blocks[0]
    own = insides.own_units(block)
    assert len(own) == 2
    block.set_requires_gradient_sync(False, recurse=False)
    assert {unit.settings.sync for unit in own} == {GradientSync.NONE}
    block.set_gradient_sync(GradientSync.FULL, recurse=False)
    block.set_unshard_in_backward(False)
    assert not any(unit.settings.unshard_in_backward for unit in own)
    block.set_unshard_in_backward(True)
    model.set_modules_to_forward_prefetch([block])
    prefetched = insides.units(model)[0].settings.forward_prefetch
    assert [ref() for ref in prefetched] == own
    model.set_modules_to_forward_prefetch([])
    seen = []
    hook = type("Hook", (), {"after": lambda self, shard: seen.append(shard.numel())})()
    handle = meshard.register_reduce_hook(block, hook, recurse=False)
    for async_op in (False, True):
        gather = block.unshard(async_op=async_op)
        if async_op:
            gather.wait()
        assert type(block.dense.weight) is type(block.expert.weight) is nn.Parameter
        assert block.dense.weight.shape == block.expert.weight.shape == (5, 5)
        block.reshard()
        assert block.expert.weight.device_mesh.size() == 2
    model(batch_of(0)).sum().backward()
    assert len(seen) == 2
    handle.remove()


@on_threads(4)
def test_what_a_forward_left_unsharded_is_not_trusted_on_any_mesh():
    model, plain, x = shard(build(), "flat"), build(), batch_of(0)
    names = ("scale", "expert.weight", "expert.bias")
    sharded = [model.get_parameter(name) for name in names]
    assert_same(model(x), plain(x))  # without a backward, the root stays unsharded
    for name, param in zip(names, sharded, strict=True):
        param.data.to_local().mul_(2)  # raises no version
        plain.get_parameter(name).data.mul_(2)
    assert_same(model(x), plain(x))


@on_threads(4)
def test_an_exception_leaves_all_meshes_sharded():
    model = shard(build(), "flat")
    handle = model.blocks[1].expert.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch_of(0))
    handle.remove()
    assert [name for name, p in model.named_parameters() if not hasattr(p, "device_mesh")] == []
    check_gradients(model, build(), same_on_all)


@on_threads(4)
def test_inputs_and_outputs_are_cast_once():
    model = shard(build(), "flat", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    model.blocks[0].expert.register_forward_hook(lambda m, a, y: seen.append((a[0].dtype, y.dtype)))
    out = model(batch_of(0))
    assert out.dtype == torch.bfloat16 and seen == [(torch.bfloat16, torch.bfloat16)]
    first, second = insides.own_units(model)
    assert (first.input_dtype, first.output_dtype) == (torch.bfloat16, None)
    assert (second.input_dtype, second.output_dtype) == (None, None)
    assert_same(out.float(), build()(batch_of(0)), torch.bfloat16)


@on_threads(4)
def test_units_nest_and_a_deleted_model_is_gone_at_once():
    """A unit whose parameters are all on another mesh, inside of one that has both."""
    most, of_experts = meshes("flat")
    model = seeded(nn.Sequential(block(), nn.Linear(5, 5)))
    plain = seeded(nn.Sequential(block(), nn.Linear(5, 5)))
    elsewhere = ShardPlacementResult(Shard(0), of_experts)
    meshard.fully_shard(model[0].expert, most, shard_placement_fn=lambda _: elsewhere)
    assert len(insides.own_units(model[0].expert)) == 1
    head = set(model[1].parameters())
    choose = lambda param: elsewhere if param in head else None  # noqa: E731
    meshard.fully_shard(model, most, shard_placement_fn=choose)
    check_training(model, plain, same_on_all, steps=2)
    alive = weakref.ref(model[1].weight)
    head.clear()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
