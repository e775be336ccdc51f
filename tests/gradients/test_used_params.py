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
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import Made, Table, seeded
from tests.support.ones import make
from tests.support.parity import assert_same
from tests.support.ranks import on_ranks, on_threads
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


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["F", "RF", "NF", "RNRF"])
def test_ranks_that_use_different_parameters_of_the_same_size_stay_apart(schedule):
    experts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    plain = Made(lambda module, x, which: module.experts[which](x), experts=experts)
    model, plain = sharded_and_plain(plain, units=(), mesh_shape=(2, 2))

    def step(model, rank):
        for number, mode in enumerate(schedule):
            if isinstance(model, meshard.FSDPModule):
                model.set_gradient_sync(MODES[mode])
            model(inputs_of(rank, number, shape=(3, 4)), "abba"[rank]).sum().backward()

    check_gradients(model, plain, step, times=1)


@on_ranks(2)
def test_parameters_may_be_frozen_and_thawed_between_steps():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model, plain = sharded_and_plain(layers, units=("0", "2"))
    for frozen in ((), ("0.weight",), ("0.weight", "2.weight", "2.bias"), ("2.bias",), ()):
        for each in (model, plain):
            for name, param in each.named_parameters():
                param.requires_grad_(name not in frozen)
        check_training(model, plain, steps=1)


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
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(len(schedule), ranks, 7, 3, generator=generator)
    exact = gradients.double().sum((0, 1)) / ranks
    magnitude = gradients.double().abs().sum((0, 1)) / ranks
    num_sums = len(schedule) + math.ceil(math.log2(ranks)) + 2 + len(mesh)
    bound = num_sums * torch.finfo(torch.float32).eps * magnitude
    if wire_dtype == torch.bfloat16:
        # To nearest is half an eps: into the reduce-scatter, into the all-reduce, in its sums.
        roundings = 1 + (len(mesh) == 2) * (1 + mesh[0])
        bound = bound + roundings * torch.finfo(torch.bfloat16).eps / 2 * magnitude * 1.01
    policy = meshard.MixedPrecisionPolicy(reduce_dtype=wire_dtype)

    def gradient():
        model = meshard.fully_shard(
            Table([(7, 3)]), init_device_mesh("cpu", mesh), mp_policy=policy
        )
        for number, mode in enumerate(schedule):
            model.set_gradient_sync(MODES[mode])
            model(torch.zeros(()), [gradients[number, dist.get_rank()]]).backward()
        return model.params[0].grad.full_tensor()

    first, *others = run_threads(gradient, ranks) + run_threads(gradient, ranks)
    assert all(torch.equal(first, other) for other in others)  # every replica, bit for bit
    assert ((first.double() - exact).abs() <= bound).all()


@on_threads(2)
@pytest.mark.parametrize("rank_that_uses", [0, 1])
def test_a_sum_too_small_for_the_accumulate_dtype_was_still_used(rank_that_uses):
    policy = meshard.MixedPrecisionPolicy(accumulate_dtype=torch.float16)
    model = make((2,), mp_policy=policy)
    model(-1e-9 if dist.get_rank() == rank_that_uses else None, 1.0).backward()
    assert model.a.grad is not None


@on_threads(2)
def test_gradients_put_in_before_a_backward_are_added_to():
    """Put a gradient in after zero_grad, in the very memory that ours had."""
    model = make((2,))
    model(1.0).backward()
    mine = model.a.grad.to_local().detach()
    model.zero_grad()
    mine.fill_(100.0)
    model.a.grad = DTensor.from_local(mine, model.a.device_mesh, [Shard(0)])
    model(1.0).backward()
    assert model.a.grad.to_local().tolist() == [101.0] * 2
