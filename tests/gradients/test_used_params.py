"""Parameters that some ranks or microbatches do not use."""

import copy
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from tests.gradients.windows import (
    expected_reductions,
    growth_of_errors,
    run_window,
    sums,
    windows,
)
from tests.support import strategies
from tests.support.models import Made, Ones, Table, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.strategies import MODES
from tests.support.threads import run_threads


@given(window=windows())
def test_any_window_leaves_the_right_sums_and_sends_the_same_on_all_ranks(window):
    ranks = strategies.num_ranks(window.mesh)
    results = run_threads(run_window, ranks, window)
    for _, events in results:
        assert events == results[0][1]
    for u, label in enumerate([*(f"units.{u}" for u in range(len(window.params) - 1)), "(root)"]):
        sent = [event for event in results[0][1] if event.unit == label]
        reductions = [event for event in sent if event.op != "all_gather"]
        counted = Counter((event.op, event.payload_bytes, event.dtype) for event in reductions)
        assert counted == expected_reductions(window, u), label
    is_exact = math.log2(window.factor).is_integer()
    for u, row in enumerate(sums(window)):
        for p, total in enumerate(row):
            param = window.params[u][p]
            if 0 in param.shape:
                continue  # has nothing that could be used
            for rank, (shards, _) in enumerate(results):
                found, where = shards[u][p], f"unit {u} parameter {p} on rank {rank}"
                assert (found is None) == (total is None), where
                if total is None:
                    continue
                exact, magnitude = (
                    param.shard_of(value / window.factor, window.shards, rank % window.shards)
                    for value in total
                )
                assert found.dtype == param.dtype and found.shape == exact.shape, where
                bound = 0.0 if is_exact else growth_of_errors(window, u, param) * magnitude
                assert ((found.double() - exact).abs() <= bound).all(), where
                replica_0 = results[rank % window.shards][0][u][p]
                assert torch.equal(found, replica_0), where


def diverge(schedule):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    net = Made(lambda module, x, which: module.experts[which](x), experts=model)
    plain = copy.deepcopy(net)
    meshard.fully_shard(net, init_device_mesh("cpu", (2, 2)))
    xs = torch.randn(4, 3, 4)
    rank = dist.get_rank()
    pick = ["a", "b", "b", "a"]
    for sync in schedule:
        net.set_gradient_sync(MODES[sync])
        net(xs[rank], pick[rank]).sum().backward()
        for other in range(4):
            (plain(xs[other], pick[other]).sum() / 4).backward()
    assert_same(full_grads(net), full_grads(plain))


def test_ranks_that_use_different_parameters_of_the_same_size_stay_apart(run_ranks):
    for schedule in ("F", "RF", "NF", "RNRF"):
        run_ranks(diverge, 4, schedule)


@on_ranks(2)
def test_parameters_may_be_frozen_and_thawed_between_steps():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    plain = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    both = (model, plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in both]
    xs = torch.randn(2, 3, 4)
    for frozen in ((), ("0.weight",), ("0.weight", "2.weight", "2.bias"), ("2.bias",), ()):
        for each, x in zip(both, (xs[dist.get_rank()], xs.flatten(0, 1)), strict=True):
            for name, param in each.named_parameters():
                param.requires_grad_(name not in frozen)
            each(x).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(plain))


@pytest.mark.parametrize("apply", [meshard.fully_shard, meshard.replicate])
@on_ranks(2)
def test_a_module_may_be_frozen_between_forward_and_backward(apply):
    """No rank has a gradient of it then, so there is nothing to reduce."""
    plain = seeded(nn.Linear(4, 4))
    model, inputs = apply(copy.deepcopy(plain)), []
    for each in (model, plain):
        inputs.append(torch.ones(1, 4, requires_grad=True))
        loss = each(inputs[-1]).sum()
        each.requires_grad_(False)
        loss.backward()
    assert_same(inputs[0].grad, inputs[1].grad)
    assert all(param.grad is None for param in model.parameters())


def float_window(mesh_shape, schedule, wire_dtype, seed):
    """Return the first parameter's gradient and the exact sum, for gradients that are floats."""
    mesh = init_device_mesh("cpu", mesh_shape)
    policy = meshard.MixedPrecisionPolicy(reduce_dtype=wire_dtype)
    model = meshard.fully_shard(Table([(7, 3)]), mesh, mp_policy=policy)
    generator = torch.Generator().manual_seed(seed)
    ranks = dist.get_world_size()
    all_gradients = torch.randn(len(schedule), ranks, 7, 3, generator=generator)
    for k, sync in enumerate(schedule):
        model.set_gradient_sync(MODES[sync])
        model(torch.zeros(()), [all_gradients[k, dist.get_rank()]]).backward()
    return next(model.parameters()).grad.full_tensor(), all_gradients


@pytest.mark.slow
@given(
    mesh=strategies.meshes(),
    schedule=strategies.schedules(5),
    wire_dtype=st.sampled_from([None, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_floats_stay_within_the_derived_bound_and_are_deterministic(
    mesh, schedule, wire_dtype, seed
):
    """(K + log2 D + 2) eps of the accumulate dtype, and one rounding to the wire per collective."""
    ranks = strategies.num_ranks(mesh)
    args = (mesh, schedule, wire_dtype, seed)
    first, second = run_threads(float_window, ranks, *args), run_threads(float_window, ranks, *args)
    for (grad, gradients), (again, _) in zip(first, second, strict=True):
        assert torch.equal(grad, again)
        assert torch.equal(grad, first[0][0])  # every replica, bit for bit
        exact = gradients.double().sum((0, 1)) / ranks
        magnitude = gradients.double().abs().sum((0, 1)) / ranks
        sums = len(schedule) + math.ceil(math.log2(ranks)) + 2 + len(mesh)
        bound = sums * torch.finfo(torch.float32).eps * magnitude
        if wire_dtype == torch.bfloat16:
            # To nearest is half an eps: into the reduce-scatter, into the all-reduce, in its sums.
            roundings = 1 + (len(mesh) == 2) * (1 + mesh[0])
            bound = bound + roundings * torch.finfo(torch.bfloat16).eps / 2 * magnitude * 1.01
        assert ((grad.double() - exact).abs() <= bound).all()


def almost_nothing_in_a_narrow_sum(rank_that_uses):
    policy = meshard.MixedPrecisionPolicy(accumulate_dtype=torch.float16)
    model = meshard.fully_shard(Ones(), init_device_mesh("cpu", (2,)), mp_policy=policy)
    model(-1e-9 if dist.get_rank() == rank_that_uses else None, 1.0).backward()
    return model.a.grad is None


def test_a_sum_too_small_for_the_accumulate_dtype_was_still_used():
    for rank in range(2):
        assert run_threads(almost_nothing_in_a_narrow_sum, 2, rank) == [False, False]


def gradient_of_ones_own():
    """Put a gradient in after zero_grad, in the very memory that ours had."""
    model = meshard.fully_shard(seeded(nn.Linear(4, 4, bias=False)), init_device_mesh("cpu", (2,)))
    model(torch.ones(1, 4)).sum().backward()
    mine = model.weight.grad.to_local().detach()
    model.zero_grad()
    mine.fill_(100.0)
    model.weight.grad = DTensor.from_local(mine, model.weight.device_mesh, [Shard(0)])
    model(torch.ones(1, 4)).sum().backward()
    return model.weight.grad.to_local().flatten().tolist()


def test_gradients_put_in_before_a_backward_are_added_to():
    assert run_threads(gradient_of_ones_own, 2) == [[101.0] * 8] * 2
