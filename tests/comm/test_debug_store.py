"""MESHARD_DEBUG=1 when a rank ends, and with it the store."""

import multiprocessing
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from meshard._comm import divergence
from tests.support.models import MlpStack, seeded
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    monkeypatch.setenv("MESHARD_DEBUG_TIMEOUT", "30")


@on_ranks(3)
def test_the_store_does_not_grow():
    model, num_keys = shard_blocks(seeded(MlpStack())), []
    for num_steps in (2, 6):
        for _ in range(num_steps):
            model(torch.ones(1, 6)).sum().backward()
        dist.barrier()
        num_keys.append(dist.group.WORLD.get_group_store().num_keys())
        dist.barrier()
    assert num_keys[0] == num_keys[1]


# --- a store that lives in rank 0 ----------------------------------------------------------


def _meet_in_store_of_rank_0(rank, port, how, replies):
    patience = "30" if how == "differ" else "2"
    os.environ.update(MESHARD_DEBUG="1", MESHARD_DEBUG_TIMEOUT=patience, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        time.sleep(1 if how == "differ" else 5)
    try:
        divergence.check_fingerprint(
            f"what rank {rank if how == 'differ' else 0} does", dist.group.WORLD
        )
    except RuntimeError as error:
        replies.put((rank, str(error)))
        replies.close()
        replies.join_thread()
    os._exit(0)  # at once, as a job does that ends in an exception


def meet_in_store_of_rank_0(how):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    replies = context.Queue()
    processes = [
        context.Process(target=_meet_in_store_of_rank_0, args=(rank, port, how, replies))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        return dict(replies.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
def test_ranks_that_end_at_once_have_all_read_the_error():
    replies = meet_in_store_of_rank_0("differ")
    assert replies[0] == replies[1]
    assert "rank 0: what rank 0 does\n  rank 1: what rank 1 does" in replies[0]


@pytest.mark.slow
def test_a_rank_that_finds_the_others_gone_says_what_it_was_about_to_do():
    for rank, reply in meet_in_store_of_rank_0("late").items():
        assert f"rank {rank} is about to issue what rank 0 does (number 0 among ranks 0" in reply
        assert "or ended, which then is the first to look at" in reply
