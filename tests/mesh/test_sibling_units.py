"""Sibling units: a module with parameters on several meshes behaves as one unit."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy, ShardPlacementResult
from tests.mesh.expert_meshes import SGD, Block, Net, batch_of, build, meshes, shard
from tests.support import insides
from tests.support.models import seeded
from tests.support.parity import (
    assert_same,
    full_grads,
    full_state,
)
from tests.support.ranks import on_threads
from tests.support.threads import run_threads


def look_at_units():
    model = shard(build(), "flat")
    most = model.scale.device_mesh
    assert model.blocks[0].dense.weight.placements == (Shard(0),)
    assert model.blocks[0].dense.weight.device_mesh == most
    expert = model.blocks[0].expert.weight
    assert expert.placements == (Shard(1),) and expert.device_mesh.mesh_dim_names == ("edp",)
    with CommLedger(model) as ledger:
        model(batch_of(0, 0, width=5)).sum().backward()
    in_order = ["(root)", "blocks.0", "blocks.1"]
    units = [label for name in in_order for label in (name, f"{name} on edp=2")]
    gathers = [event for event in ledger.events if event.op == "all_gather"]
    assert sorted({event.unit for event in gathers}) == sorted(units)
    assert {event.group_size for event in gathers if "edp" in event.unit} == {2}
    assert {event.group_size for event in gathers if "edp" not in event.unit} == {4}
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    first = list(dict.fromkeys(reduced))  # in a process of its own, each comes once
    assert first == [
        "blocks.1 on edp=2",
        "blocks.1",
        "blocks.0 on edp=2",
        "blocks.0",
        "(root) on edp=2",
        "(root)",
    ]
    assert [line.split("  ")[0] for line in meshard.describe(model).splitlines()[1:7]] == units
    with CommLedger(model) as ledger:  # now that the order is known
        model(batch_of(0, 0, width=5)).sum().backward()
    gathered = [event.unit for event in ledger.events if event.op == "all_gather"]
    assert gathered == [*units, *units[4:], *units[2:4]]
    return len(gathers), len(reduced)


def test_every_mesh_has_a_unit_and_the_inner_one_is_reduced_first(run_ranks):
    counts = run_ranks(look_at_units, 4, timeout=200)
    assert counts == [(2 * 2 * 3 - 2, 2 * 3)] * 4  # the root, both of it, stays whole for backward


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
    block.unshard()
    assert block.dense.weight.shape == block.expert.weight.shape == (5, 5)
    assert type(block.dense.weight) is type(block.expert.weight) is nn.Parameter
    block.reshard()
    assert block.expert.weight.device_mesh.size() == 2
    handle_of_gather = block.unshard(async_op=True)
    handle_of_gather.wait()
    assert type(block.expert.weight) is nn.Parameter
    block.reshard()
    model(batch_of(0, 0, width=5)).sum().backward()
    assert len(seen) == 2
    handle.remove()


@on_threads(4)
def test_what_a_forward_left_whole_is_not_trusted_on_any_mesh():
    model = shard(build(), "flat")
    x = batch_of(0, 0, width=5)
    params = model.scale, model.expert.weight, model.expert.bias
    before = model(x)  # without a backward, the root is left whole
    for param in params:
        param.data.to_local().mul_(2)  # raises no version
    after = model(x)
    plain = build()
    assert_same(before, plain(x))
    with torch.no_grad():
        for param in (plain.scale, plain.expert.weight, plain.expert.bias):
            param.mul_(2)
    assert_same(after, plain(x))


class Stop(Exception):
    pass


@on_threads(4)
def test_an_exception_leaves_all_meshes_sharded():
    model = shard(build(), "flat")
    x = batch_of(0, 0, width=5)

    def stop(*_):
        raise Stop

    handle = model.blocks[1].expert.register_forward_hook(stop)
    with pytest.raises(Stop):
        model(x)
    handle.remove()
    for param in model.parameters():
        assert hasattr(param, "device_mesh")
    model(x).square().sum().backward()
    plain = build()
    plain(x).square().sum().backward()
    assert_same(full_grads(model), full_grads(plain))


def compute_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(build(), "flat", mp_policy=policy)
    seen = []
    model.blocks[0].expert.register_forward_hook(lambda m, a, y: seen.append((a[0].dtype, y.dtype)))
    out = model(batch_of(0, 0, width=5))
    assert out.dtype == torch.bfloat16 and seen == [(torch.bfloat16, torch.bfloat16)]
    assert [(each.input_dtype, each.output_dtype) for each in insides.own_units(model)] == [
        (torch.bfloat16, None),
        (None, None),
    ]
    return out.float()


def test_inputs_and_outputs_are_cast_once():
    expected = build()(batch_of(0, 0, width=5))
    for out in run_threads(compute_in_bfloat16, 4):
        assert_same(out, expected, torch.bfloat16)


class Inner(nn.Module):
    """A unit whose parameters are all on another mesh, inside of one that has both."""

    def __init__(self):
        super().__init__()
        self.block = Block(5)
        self.head = nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.block(x))


def nest():
    most, of_experts = meshes("flat")
    model = seeded(Inner())
    meshard.fully_shard(
        model.block.expert,
        most,
        shard_placement_fn=lambda _: ShardPlacementResult(Shard(0), of_experts),
    )
    assert len(insides.own_units(model.block.expert)) == 1

    head = set(model.head.parameters())

    def head_elsewhere(param):
        return ShardPlacementResult(Shard(0), of_experts) if param in head else None

    meshard.fully_shard(model, most, shard_placement_fn=head_elsewhere)
    x = batch_of(0, 0, width=5)
    optimizer = SGD(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        grads = full_grads(model)
        optimizer.step()
    alive = weakref.ref(model.head.weight)
    state = full_state(model)
    gc.disable()
    try:
        del model, optimizer
        assert alive() is None
    finally:
        gc.enable()
    return grads, state


def test_units_nest_and_a_deleted_model_is_gone_at_once():
    plain = seeded(Inner())
    optimizer = SGD(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        plain(batch_of(0, 0, width=5)).square().sum().backward()
        grads = full_grads(plain)
        optimizer.step()
    for found in run_threads(nest, 4):
        assert_same(found[0], grads)
        assert_same(found[1], full_state(plain))


def materialize_several():
    with torch.device("meta"):
        model = Net()
        model.reset_parameters = lambda: nn.init.ones_(model.scale)
    shard(model, "flat")
    torch.manual_seed(3)
    meshard.materialize(model)
    return full_state(model)


def test_materialized_values_are_those_of_an_unsharded_model(run_ranks):
    torch.manual_seed(3)
    plain = Net()
    nn.init.ones_(plain.scale)
    for state in run_ranks(materialize_several, 4, timeout=200):
        assert_same(state, full_state(plain), bitwise=True)
