"""Requests to the store under MESHARD_DEBUG=1, and the loss of the store."""

import multiprocessing
import os
import socket
import time
from unittest import mock

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


class CountingStore:
    """Keeps the names of the requests to a store."""

    def __init__(self, store, requests):
        self._store, self._requests = store, requests

    def __getattr__(self, name):
        self._requests.append(name)
        return getattr(self._store, name)


@on_ranks(4)
def test_a_rank_asks_the_store_ten_times_at_most_however_many_ranks_there_are():
    """Five times for each rank, nine for the last to come; a slow machine may look twice."""
    original, requests = divergence._store_of, []
    counting = mock.patch.object(
        divergence, "_store_of", lambda group: CountingStore(original(group), requests)
    )
    for _ in range(20):
        dist.barrier()
        requests.clear()
        with counting:
            divergence.check_fingerprint("something", dist.group.WORLD)
        assert len(requests) <= 10


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
def test_the_rank_that_holds_the_store_ends_when_all_have_read_the_error():
    replies = meet_in_store_of_rank_0("differ")
    assert replies[0] == replies[1]
    assert "rank 0: what rank 0 does\n  rank 1: what rank 1 does" in replies[0]


@pytest.mark.slow
def test_a_rank_that_finds_the_store_gone_says_what_it_was_about_to_do():
    replies = meet_in_store_of_rank_0("late")
    assert "rank 1: nothing within 2 s" in replies[0]
    assert "rank 1 is about to issue what rank 0 does (number 0 among ranks 0, 1)" in replies[1]
    assert "the rank or launcher that holds it has probably ended" in replies[1]


def time_out_in(store):
    try:
        return divergence._is_written_within(0.1, store, "never")
    except RuntimeError as error:
        return error


def test_only_a_timeout_is_taken_for_a_rank_that_did_not_come(tmp_path):
    class Gone:
        def wait(self, keys, timeout):
            raise dist.DistNetworkError("Connection timeout")

    assert time_out_in(dist.HashStore()) is False
    assert time_out_in(dist.FileStore(str(tmp_path / "store"), 1)) is False
    assert isinstance(time_out_in(Gone()), dist.DistNetworkError)
