"""Errors of MESHARD_DEBUG=1 that name unit and ranks."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync, microbatches
from tests.support.models import ChosenBlocks, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


def make(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_blocks(model, mesh)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    monkeypatch.setenv("MESHARD_DEBUG_TIMEOUT", "30")


def diverge(choices):
    model = make(seeded(ChosenBlocks()))
    chosen = choices[dist.get_rank()]
    with pytest.raises(RuntimeError, match="about to issue different collectives") as error:
        model(torch.ones(1, 6), chosen).sum().backward()
    return str(error.value)


def test_ranks_that_run_different_units_are_told_which(run_ranks, debug):
    for message in run_ranks(diverge, 2, [(0, 1), (0, 2)]):
        assert "rank 0: all_gather of unit 'blocks.1' (" in message
        assert "rank 1: all_gather of unit 'blocks.2'" in message
        assert "Every rank must run the same units" in message


@pytest.mark.parametrize("until_last", [GradientSync.REDUCE_SCATTER, GradientSync.FULL])
@on_ranks(2)
def test_a_rank_with_one_microbatch_more_is_told(debug, until_last):
    """Otherwise it would be added to the first one of the other rank's next window."""
    model = make(seeded(MlpStack()))

    def train():
        for count in [3, 2] if dist.get_rank() == 0 else [2, 3]:
            for _ in microbatches(model, range(count), until_last=until_last):
                model(torch.ones(1, 6)).sum().backward()

    with pytest.raises(RuntimeError, match="different collectives") as error:
        train()
    assert str(error.value).count("the last of its window") == 1
    assert "with as many microbatches" in str(error.value)


def run_less():
    model = make(seeded(ChosenBlocks()))
    chosen = (0, 1, 2) if dist.get_rank() == 0 else (0, 1)
    dist.barrier()
    os.environ["MESHARD_DEBUG_TIMEOUT"] = "2"
    start = time.monotonic()
    with torch.no_grad():
        if dist.get_rank() == 1:
            model(torch.ones(1, 6), chosen)
            time.sleep(4)
            return "", 0.0
        with pytest.raises(RuntimeError, match="different collectives") as error:
            model(torch.ones(1, 6), chosen)
    return str(error.value), time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_time(run_ranks, debug):
    message, seconds = run_ranks(run_less, 2)[0]
    assert "rank 1: nothing within 2 s" in message
    assert seconds < 10


def clip_on_one_rank():
    model = make(seeded(ChosenBlocks()))
    model(torch.ones(1, 6), (0, 1)).sum().backward()
    clip, forward = (meshard.clip_grad_norm_, (model, 1.0)), (model, (torch.ones(1, 6), (0, 1)))
    do, args = clip if dist.get_rank() == 0 else forward
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="different collectives") as error:
        do(*args)
    return str(error.value), time.monotonic() - start


def test_a_rank_that_clips_alone_is_named(run_ranks, debug):
    for message, seconds in run_ranks(clip_on_one_rank, 3):
        assert "rank 0: all_gather (norm)" in message
        assert "rank 2: all_gather of unit 'blocks.0'" in message
        assert seconds < 30  # all came: nobody waits for the timeout


def train():
    model = make(seeded(MlpStack()))
    with CommLedger(model) as ledger:
        for sync in (GradientSync.NONE, GradientSync.FULL):
            model.set_gradient_sync(sync)
            model(torch.ones(1, 6) * dist.get_rank()).sum().backward()
        meshard.clip_grad_norm_(model, 1e6)
    return full_grads(model), ledger.counts


def test_checks_change_neither_numbers_nor_counts(run_ranks, monkeypatch):
    plain = run_ranks(train, 3)
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    for (grads, counts), (expected, expected_counts) in zip(
        run_ranks(train, 3), plain, strict=True
    ):
        assert_same(grads, expected, bitwise=True)
        assert counts == expected_counts


def train_replicas_of_one_shard():
    plain = seeded(MlpStack())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    shard_blocks(model, mesh)
    batches = torch.randn(3, dist.get_world_size(), 3, 6)
    for batch in batches:
        model(batch[dist.get_rank()]).square().mean().backward()
        plain(batch.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))


def test_what_is_sent_where_there_is_one_shard_stays(run_ranks, debug):
    run_ranks(train_replicas_of_one_shard, 2)
