"""Ways in which ranks diverge: each ends in an error, after which the model still trains."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support.models import ChosenBlocks, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread

SECONDS = 2.0  # the patience of tests in which it ends
LONG = 30.0  # of those in which it must not
MESHES = {2: (2,), 4: (2, 2)}


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    monkeypatch.setenv("MESHARD_DEBUG_TIMEOUT", str(LONG))


def make(param_dtype=None):
    model = seeded(ChosenBlocks())
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    policy = meshard.MixedPrecisionPolicy(param_dtype=param_dtype)
    return shard_blocks(model, mesh, mp_policy=policy)


def step(model, *args):
    model(torch.full((1, 6), 1.0 + dist.get_rank()), *args).sum().backward()


# --- how ranks diverge: called on every rank with two models; the odd rank is the last ---


def is_odd():
    return dist.get_rank() == dist.get_world_size() - 1


def other_unit_in_forward(model, _):
    step(model, (0, 2) if is_odd() else (0, 1))


def late(model, _):
    if is_odd():
        time.sleep(1.7 * SECONDS)
    step(model)


def other_factor(model, _):
    model.blocks[1].set_gradient_divide_factor(3.0 if is_odd() else 2)
    step(model)


def other_order_of_roots(model, second):
    for each in (second, model) if is_odd() else (model, second):
        step(each)


def other_order_on_shared_streams(model, second):
    meshard.share_comm_ctx([model, second])
    other_order_of_roots(model, second)


def other_sync(model, _):
    """Ranks 0 and 1, one replica, reduce fully. The others would, one step later."""
    if dist.get_rank() >= 2:
        model.set_gradient_sync(GradientSync.REDUCE_SCATTER)
        step(model)
        time.sleep(1.2 * SECONDS)
        model.set_gradient_sync(GradientSync.FULL)
    step(model)


def other_number_of_microbatches(model, _):
    for _ in range(1 if is_odd() else 2):
        model.set_gradient_sync(GradientSync.NONE)
        step(model)
    model.set_gradient_sync(GradientSync.FULL)
    step(model)
    meshard.clip_grad_norm_(model, 1.0)


def pause_between_steps(model, _):
    step(model)
    if is_odd():
        time.sleep(1.2 * SECONDS)  # saves a checkpoint, say
    step(model)


def diverge(how, patience=LONG, param_dtype=None):
    model, second, untouched = (make(param_dtype) for _ in range(3))
    dist.barrier()  # the ranks of a new pool are seconds apart
    os.environ["MESHARD_DEBUG_TIMEOUT"] = str(patience)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="about to issue different collectives") as error:
        how(model, second)
    seconds = time.monotonic() - start
    os.environ["MESHARD_DEBUG_TIMEOUT"] = str(LONG)
    assert "Every rank must run the same units" in str(error.value)
    for each in (model, second):
        each.reset_iter_state()
        each.set_gradient_sync(GradientSync.FULL)
        each.zero_grad()
    for block in model.blocks:
        block.set_gradient_divide_factor(dist.get_world_size())
    for each in (model, untouched):
        step(each)
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)
    return str(error.value), seconds


def test_a_unit_that_one_rank_does_not_run(run_ranks):
    for message, seconds in run_ranks(diverge, 2, other_unit_in_forward):
        assert "rank 0: all_gather of unit 'blocks.1' (root " in message
        assert "rank 1: all_gather of unit 'blocks.2' (root " in message
        assert seconds < LONG  # all came: nobody waits for the timeout


@pytest.mark.slow
def test_a_rank_that_comes_late_gets_the_error_that_the_others_had(run_ranks):
    punctual, tardy = run_ranks(diverge, 2, late, SECONDS)
    for message, _ in (punctual, tardy):
        assert "rank 0: all_gather of unit 'blocks.0'" in message
        assert "rank 1: nothing within 2 s; its last was " in message
    assert "This is rank 1, which came later: all_gather of unit 'blocks.0'" in tardy[0]


def test_a_divide_factor_that_differs(run_ranks):
    for message, _ in run_ranks(diverge, 2, other_factor):
        assert "rank 0: the reduction of unit 'blocks.1', divided by 2.0" in message
        assert "rank 1: the reduction of unit 'blocks.1', divided by 3.0" in message


@spread(
    param_dtype=[None, torch.bfloat16], how=[other_order_of_roots, other_order_on_shared_streams]
)
def test_two_models_in_another_order(run_ranks, how, param_dtype):
    for message, _ in run_ranks(diverge, 2, how, LONG, param_dtype):
        # The fourth and the eighth call of fully_shard.
        assert "rank 0: all_gather of unit 'blocks.0' (root 4, " in message
        assert "rank 1: all_gather of unit 'blocks.0' (root 8, " in message


def test_another_number_of_microbatches(run_ranks):
    for message, _ in run_ranks(diverge, 2, other_number_of_microbatches):
        assert "rank 0: all_gather of unit 'blocks.0'" in message
        assert "rank 1: the reduction of unit 'blocks.2'" in message


@pytest.mark.slow
def test_a_rank_that_pauses_is_named_with_what_it_did_last(run_ranks):
    for message, _ in run_ranks(diverge, 2, pause_between_steps, SECONDS):
        assert "rank 0: all_gather of unit 'blocks.0'" in message
        assert (
            "rank 1: nothing within 2 s; its last was reduce_scatter of unit 'blocks.0'" in message
        )


@pytest.mark.slow
def test_a_divergence_inside_one_replica_is_told_to_the_others(run_ranks):
    results = run_ranks(diverge, 4, other_unit_in_forward)
    for rank, (message, seconds) in enumerate(results):
        assert "rank 2: all_gather of unit 'blocks.1'" in message
        assert "rank 3: all_gather of unit 'blocks.2'" in message
        assert seconds < LONG
        if rank < 2:
            assert f"rank {rank}: the reduction of unit 'blocks.1'" in message
            assert f"rank {rank + 2}: nothing yet\n" in message
            assert "Before that, among other ranks: the ranks are about to issue" in message


@pytest.mark.slow
def test_replicas_that_reduce_to_different_depths(run_ranks):
    for rank, (message, _) in enumerate(run_ranks(diverge, 4, other_sync, SECONDS)):
        first = rank % 2
        assert f"rank {first}: the reduction of unit 'blocks.2' over shards and replicas" in message
        # The pair whose patience ends first tells the other, if that still waits.
        waited = [f"rank {late}: nothing within 2 s; its last was " in message for late in (2, 3)]
        assert waited[first] or (any(waited) and f"rank {first + 2}: nothing yet\n" in message)
        assert "among ranks 2, 3" in message
