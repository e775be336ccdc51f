"""Sharded training against one process on the whole batch."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import meshard
from tests.support.cases import CASES
from tests.support.integer_model import LEARNING_RATE
from tests.support.parity import assert_same_run, train, train_plain

SGD = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
STEPS = 10
MESHES = [(2,), (3,), (2, 2)]


def last_dim(param):
    return Shard(param.dim() - 1)


def train_sharded(case_name, mesh_shape, optimizer_fn, steps, divide_factor=None, **kwargs):
    case = CASES[case_name]
    mesh = init_device_mesh("cpu", mesh_shape)
    model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, **kwargs)
    if divide_factor is not None:
        model.set_gradient_divide_factor(divide_factor)
    return train(
        model,
        case.batches(steps, dist.get_rank()),
        optimizer_fn,
        loss_fn=case.loss,
        reduce_loss="sum" if case.loss_is_sum else "mean",
    )


def one_process(case_name, num_ranks, optimizer_fn, steps):
    case = CASES[case_name]
    batches = case.whole_batches(steps, num_ranks)
    return train_plain(case.build(), batches, optimizer_fn, loss_fn=case.loss)


def num_ranks_of(mesh_shape):
    return mesh_shape[0] if len(mesh_shape) == 1 else mesh_shape[0] * mesh_shape[1]


@pytest.mark.default_rows(3)
@pytest.mark.parametrize("mesh_shape", [(1,), *MESHES, (1, 2), (2, 1)])
def test_integer_gradients_agree_bit_for_bit_over_ten_steps(run_ranks, mesh_shape):
    num_ranks = num_ranks_of(mesh_shape)
    expected = one_process("integer", num_ranks, SGD, STEPS)
    runs = run_ranks(train_sharded, num_ranks, "integer", mesh_shape, SGD, STEPS, divide_factor=1.0)
    for run in runs:
        assert_same_run(run, expected, bitwise=True)
    # The oracle moves: a model that does not learn would agree with anything.
    assert len({step.loss for step in expected}) > 1
    first, last = expected[0].params, expected[-1].params
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False, 2, 4])
@pytest.mark.parametrize("placement_fn", [None, last_dim])
def test_every_way_of_resharding_gives_the_same_bits(
    run_ranks, reshard_after_forward, placement_fn
):
    expected = one_process("integer", 4, SGD, 3)
    runs = run_ranks(
        train_sharded,
        4,
        "integer",
        (4,),
        SGD,
        3,
        divide_factor=1.0,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=placement_fn,
    )
    for run in runs:
        assert_same_run(run, expected, bitwise=True)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("case_name", [name for name in CASES if name != "integer"])
def test_float_training_agrees_to_rounding(run_ranks, case_name, mesh_shape):
    """Losses, gradients and parameters, within ``parity.TOLERANCES`` of the coarsest dtype."""
    num_ranks = num_ranks_of(mesh_shape)
    steps = 3 if case_name == "mixed_dtype" else STEPS
    optimizer_fn = functools.partial(torch.optim.SGD, lr=1e-2)
    expected = one_process(case_name, num_ranks, optimizer_fn, steps)
    for run in run_ranks(train_sharded, num_ranks, case_name, mesh_shape, optimizer_fn, steps):
        assert_same_run(run, expected, CASES[case_name].dtype)


def train_in_float64(mesh_shape):
    case = CASES["transformer"]
    mesh = init_device_mesh("cpu", mesh_shape)
    model = case.build().double()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    batches = case.batches(STEPS, dist.get_rank())
    return train(model, batches, ADAM, loss_fn=case.loss, reduce_loss="mean")


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("mesh_shape", MESHES)
def test_adam_in_float64_agrees_to_rounding_of_float64(run_ranks, mesh_shape):
    case = CASES["transformer"]
    num_ranks = num_ranks_of(mesh_shape)
    batches = case.whole_batches(STEPS, num_ranks)
    expected = train_plain(case.build().double(), batches, ADAM, loss_fn=case.loss)
    for run in run_ranks(train_in_float64, num_ranks, mesh_shape):
        for ours, theirs in zip(run, expected, strict=True):
            for name, param in theirs.params.items():
                # Adam divides by the root of tiny second moments: 1e-12 in, some 1e-9 out.
                torch.testing.assert_close(ours.params[name], param, rtol=1e-8, atol=1e-9)
