"""Hooks for traces: when collectives end and are waited for, as a recorder gets them."""

import contextlib
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshard._comm.communicator import CommStream
from meshard._comm.cpu import WorkCommunicator, WorkHandle
from meshard._comm.streams import StreamCommunicator
from tests.support.fake_device import FakeDevice
from tests.support.listed_spans import listed
from tests.support.models import MlpStack, seeded
from tests.support.ranks import fake_group, on_ranks
from tests.support.sharding import shard_blocks

DELAY = 0.3  # on a busy machine a thread of gloo may come late


@on_ranks(2)
def test_a_collective_through_sockets_ends_with_its_work_and_not_with_the_wait():
    comm, source = WorkCommunicator(), torch.ones(4)
    dist.barrier()
    with listed() as recorder:
        gathering = comm.all_gather(source, group=dist.group.WORLD, label="layer")
        time.sleep(DELAY)  # compute
        waits_since = time.monotonic()
        gathering.wait()
    names = [name for name in recorder.names if name != "end"]
    assert names == ["begin all_gather", "ends later", "leave all_gather", "waited"]
    assert dict(recorder.told)["end"] < waits_since


@on_ranks(2)
def test_a_work_without_a_future_ends_when_it_was_waited_for():
    work = mock.Mock(**{"get_future.side_effect": RuntimeError("not implemented")})
    with listed() as recorder:
        recorder.event = "one that is issued"
        WorkHandle(work, torch.ones(1), ("all_gather", "layer"), dist.group.WORLD).wait()
    assert recorder.names == ["ends later", "waited"]


def test_on_streams_only_waits_of_compute_are_recorded():
    with fake_group(2), listed() as recorder:
        comm = StreamCommunicator(FakeDevice())
        with comm.on_stream(CommStream.SCATTER):
            reducing = comm.all_reduce(torch.ones(4), group=dist.group.WORLD, label="layer")
            reducing.wait()  # on the comm stream
            after = comm.record(after=reducing)
        assert "waited" not in recorder.names
        after.wait()
    assert recorder.names == ["begin all_reduce", "leave all_reduce", "waited"]


def test_while_a_graph_is_captured_no_event_is_recorded():
    device = FakeDevice()
    device.is_current_stream_capturing = lambda: True
    assert StreamCommunicator(device).clock.now() is None


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # as torch 2.11 tells each user
def test_a_profiler_shows_the_ranges_with_and_without_a_trace():
    def names_of(context):
        with context, torch.profiler.profile() as profile:
            comm.all_reduce(torch.ones(4), group=dist.group.WORLD, label="layer").wait()
        return [each.key for each in profile.key_averages() if each.key.startswith("meshard::")]

    with fake_group(2):
        comm = WorkCommunicator()
        assert names_of(contextlib.nullcontext()) == ["meshard::all_reduce layer"]
        assert names_of(listed()) == ["meshard::all_reduce layer"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # as torch 2.11 tells each user
@on_ranks(2)
def test_a_profiler_shows_ranges_of_each_unit():
    model = shard_blocks(seeded(MlpStack()))
    with torch.profiler.profile() as profile:
        model(torch.ones(1, 6)).sum().backward()
    shown = {each.key for each in profile.key_averages()}
    for unit in ("blocks.0", "(root)"):
        for what in ("all_gather", "copy_out", "reduce", "reduce_scatter"):
            assert f"meshard::{what} {unit}" in shown
