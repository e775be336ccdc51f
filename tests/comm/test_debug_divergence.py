"""MESHARD_DEBUG=1: ranks that diverge get an error, after which the model still trains."""

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync
from tests.support.against_plain import check_gradients, sharded_and_plain
from tests.support.models import ChosenBlocks, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

SECONDS = 2.0  # the patience of tests in which it ends
LONG = 30.0  # of those in which it must not
MESHES = {2: (2,), 3: (3,), 4: (2, 2)}


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


def other_unit_in_second_step(model, second):
    step(model)
    other_unit_in_forward(model, second)


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


def one_microbatch_more(until_last, model, _):
    """Otherwise it would be added to the first one of the other rank's next window."""
    for count in [2, 3] if is_odd() else [3, 2]:
        for _ in meshard.microbatches(model, range(count), until_last=until_last):
            step(model)


def clip_alone(model, _):
    step(model, (0, 1))
    if dist.get_rank() == 0:
        meshard.clip_grad_norm_(model, 1.0)
    else:
        step(model, (0, 1))


def pause_between_steps(model, _):
    step(model)
    if is_odd():
        time.sleep(1.2 * SECONDS)  # saves a checkpoint, say
    step(model)


def diverge(how, patience=LONG, param_dtype=None, match="about to issue different collectives"):
    model, second, untouched = (make(param_dtype) for _ in range(3))
    dist.barrier()  # the ranks of a new pool are seconds apart
    os.environ["MESHARD_DEBUG_TIMEOUT"] = str(patience)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=match) as error:
        how(model, second)
    seconds = time.monotonic() - start
    os.environ["MESHARD_DEBUG_TIMEOUT"] = str(LONG)
    assert "a unit or a tower that one rank has skipped" in str(error.value)
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


GATHER, REDUCTION = "all_gather of unit 'blocks.", "the reduction of unit 'blocks."


@pytest.mark.parametrize(
    ("how", "num_ranks", "of_first", "of_last"),
    [
        (other_unit_in_forward, 2, GATHER + "1' (root ", GATHER + "2' (root "),
        (other_factor, 2, REDUCTION + "1', divided by 2.0", REDUCTION + "1', divided by 3.0"),
        # The fourth and the eighth call of fully_shard.
        (other_order_of_roots, 2, GATHER + "0' (root 4, ", GATHER + "0' (root 8, "),
        (other_order_on_shared_streams, 2, GATHER + "0' (root 4, ", GATHER + "0' (root 8, "),
        (other_number_of_microbatches, 2, GATHER + "0'", REDUCTION + "2'"),
        (clip_alone, 3, "all_gather (norm)", GATHER + "0'"),
    ],
)
def test_the_error_names_what_each_rank_was_about_to_do(
    run_ranks, how, num_ranks, of_first, of_last
):
    param_dtype = torch.bfloat16 if how is other_order_on_shared_streams else None
    for message, seconds in run_ranks(diverge, num_ranks, how, param_dtype=param_dtype):
        assert f"rank 0: {of_first}" in message
        assert f"rank {num_ranks - 1}: {of_last}" in message
        assert seconds < LONG  # all came: no rank waits for the timeout


@pytest.mark.parametrize("until_last", [GradientSync.REDUCE_SCATTER, GradientSync.FULL])
def test_a_rank_with_one_microbatch_more_is_told(run_ranks, until_last):
    for message, _ in run_ranks(diverge, 2, partial(one_microbatch_more, until_last)):
        assert message.count("the last of its window") == 1
        assert "more batches or microbatches than another" in message


NOT_COME = "not all of these ranks have come to compare it: one did not within 2 s"


def test_a_rank_that_comes_late_gets_an_error_as_the_others_do(run_ranks):
    results = run_ranks(diverge, 3, late, SECONDS, match=NOT_COME)
    for rank, (message, _) in enumerate(results):
        assert f"rank {rank} is about to issue all_gather of unit 'blocks.0'" in message
        assert "(number 0 among ranks 0, 1, 2)" in message
    assert max(seconds for _, seconds in results[:2]) < 5 * SECONDS


def test_a_rank_that_pauses_is_waited_for_no_longer_than_the_timeout(run_ranks):
    for message, _ in run_ranks(diverge, 2, pause_between_steps, SECONDS, match=NOT_COME):
        assert "is about to issue all_gather of unit 'blocks.0'" in message


@pytest.mark.slow
def test_a_divergence_inside_one_replica_ends_the_wait_of_the_others(run_ranks):
    """By the connections that close, long before the timeout ends."""
    results = run_ranks(diverge, 4, other_unit_in_second_step, match="about to issue")
    for rank, (message, seconds) in enumerate(results):
        assert seconds < LONG
        if rank < 2:
            assert f"rank {rank} is about to issue the reduction of unit 'blocks.1'" in message
            assert f"among ranks {rank}, {rank + 2}" in message
        else:
            assert "rank 2: all_gather of unit 'blocks.1'" in message
            assert "rank 3: all_gather of unit 'blocks.2'" in message


@pytest.mark.slow
def test_replicas_that_reduce_to_different_depths(run_ranks):
    results = run_ranks(diverge, 4, other_sync, SECONDS, match="about to issue")
    for rank, (message, _) in enumerate(results[:2]):
        assert f"rank {rank} is about to issue the reduction of unit 'blocks.2'" in message
        assert "over shards and replicas" in message


def train():
    model = shard_blocks(seeded(MlpStack()))
    with CommLedger(model) as ledger:
        for sync in (GradientSync.NONE, GradientSync.FULL):
            model.set_gradient_sync(sync)
            step(model)
        meshard.clip_grad_norm_(model, 1e6)
    return full_grads(model), ledger.counts


def test_checks_change_neither_numbers_nor_counts(run_ranks, monkeypatch):
    checked = run_ranks(train, 3)
    monkeypatch.setenv("MESHARD_DEBUG", "0")
    for (grads, counts), (expected, expected_counts) in zip(
        checked, run_ranks(train, 3), strict=True
    ):
        assert_same(grads, expected, bitwise=True)
        assert counts == expected_counts


@on_ranks(2)
def test_what_is_sent_where_there_is_one_shard_stays():
    check_gradients(*sharded_and_plain(MlpStack(), mesh_shape=(2, 1)), times=3)
