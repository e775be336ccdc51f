"""Sharded training against one process on the whole batch."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tests.support.cases import CASES
from tests.support.integer_model import LEARNING_RATE
from tests.support.parity import assert_same, train
from tests.support.sharding import sharded_case
from tests.support.spread import slow, spread
from tests.support.threads import run_threads

SGD = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
STEPS = 10


def last_dim(param):
    return Shard(param.dim() - 1)


def train_sharded(name, mesh_shape, optimizer_fn, steps, **kwargs):
    case, model, _ = sharded_case(name, mesh_shape, **kwargs)
    if case.loss_is_sum:
        model.set_gradient_divide_factor(1.0)
    batches = case.batches(steps, dist.get_rank())
    reduce_loss = "sum" if case.loss_is_sum else "mean"
    return train(model, batches, optimizer_fn, loss_fn=case.loss, reduce_loss=reduce_loss)


def check_training(run, name, mesh_shape, optimizer_fn, steps, **kwargs):
    """Compare ``steps`` steps with those of one process; the integer case bit for bit."""
    case, num_ranks = CASES[name], math.prod(mesh_shape)
    batches = case.whole_batches(steps, num_ranks)
    expected = train(case.build(), batches, optimizer_fn, loss_fn=case.loss)
    for found in run(train_sharded, num_ranks, name, mesh_shape, optimizer_fn, steps, **kwargs):
        assert_same(found, expected, case.dtype, bitwise=case.loss_is_sum)
    # The oracle moves: a model that does not learn would agree with anything.
    first, *_, last = (step["params"] for step in expected.values())
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2), slow((1, 2)), slow((2, 1))])
def test_integer_gradients_agree_bit_for_bit_over_ten_steps(run_ranks, mesh_shape):
    check_training(run_ranks, "integer", mesh_shape, SGD, STEPS)


@spread(reshard_after_forward=[True, False, 2, 4], placement_fn=[None, last_dim, last_dim])
def test_every_way_of_resharding_gives_the_same_bits(reshard_after_forward, placement_fn):
    kwargs = {"reshard_after_forward": reshard_after_forward, "shard_placement_fn": placement_fn}
    check_training(run_threads, "integer", (4,), SGD, 3, **kwargs)


@pytest.mark.slow
@spread(name=[name for name in CASES if name != "integer"], mesh_shape=[(2,), (3,), (2, 2)])
def test_float_training_agrees_to_rounding(name, mesh_shape):
    """Losses, gradients and parameters, within ``parity.TOLERANCES`` of the coarsest dtype."""
    steps = 3 if name == "mixed_dtype" else STEPS
    check_training(
        run_threads, name, mesh_shape, functools.partial(torch.optim.SGD, lr=1e-2), steps
    )
