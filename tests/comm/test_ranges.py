"""Ranges for torch.profiler: what is issued, what compute waits for, and nothing without one."""

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard._comm.communicator import CommStream
from meshard._comm.cpu import WorkCommunicator
from meshard._comm.streams import StreamCommunicator
from tests.support.fake_device import FakeDevice
from tests.support.models import Made, MlpStack, seeded
from tests.support.ranges import profiled_ranges
from tests.support.ranks import fake_group, on_ranks
from tests.support.sharding import shard_blocks


@pytest.mark.parametrize("shares_memory", ["0", "1"])
@on_ranks(2)
def test_a_profiler_shows_what_each_unit_does(monkeypatch, shares_memory):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", shares_memory)
    model = shard_blocks(seeded(MlpStack()))
    with profiled_ranges() as names:
        model(torch.ones(1, 6)).sum().backward()
    for unit in ("blocks.0", "(root)"):
        for what in ("all_gather", "reduce_scatter"):
            count = names.count(f"{what} {unit}")
            assert count and names.count(f"wait {what} {unit}") == count
        for what in ("forward", "backward", "copy_out", "reduce"):
            assert f"{what} {unit}" in names
    assert names[-1] == "outside of units"


@on_ranks(2)
def test_marks_say_which_unit_computes_next():
    model = Made(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=nn.Linear(4, 4))
    meshard.fully_shard(model.block)
    meshard.fully_shard(model)
    with profiled_ranges() as names:
        model(torch.ones(1, 4)).sum().backward()
    assert [each for each in names if each.split()[0] in ("forward", "backward", "recompute")] == [
        "forward (root)",
        "forward block",
        "forward (root)",
        "backward (root)",
        "backward block",
        "recompute block",
        "backward block",
    ]


@on_ranks(4)
def test_a_range_in_a_part_of_the_ranks_says_which():
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    model = meshard.fully_shard(nn.Linear(4, 4), mesh)
    with profiled_ranges() as names:
        model(torch.ones(1, 4)).sum().backward()
    after = dict(itertools.pairwise(names))
    sharded = f"ranks {rank // 2 * 2},{rank // 2 * 2 + 1}"
    assert after["all_gather (root)"] == after["reduce_scatter (root)"] == sharded
    assert after["all_reduce (root)"] == f"ranks {rank % 2},{rank % 2 + 2}"


def test_on_streams_only_waits_of_compute_are_shown():
    with fake_group(2), profiled_ranges() as names:
        comm = StreamCommunicator(FakeDevice())
        with comm.on_stream(CommStream.SCATTER):
            reducing = comm.all_reduce(torch.ones(4), group=dist.group.WORLD, label="layer")
            reducing.wait()  # on the comm stream
            after = comm.record(after=reducing)
        after.wait()
    assert Counter(names) == {"all_reduce layer": 1, "wait all_reduce layer": 1}


def test_without_a_profiler_nothing_is_recorded():
    with fake_group(2), mock.patch.object(torch.profiler, "record_function") as record:
        WorkCommunicator().all_reduce(torch.ones(4), group=dist.group.WORLD, label="layer").wait()
        model = shard_blocks(MlpStack())
        model(torch.ones(1, 6)).sum().backward()
    record.assert_not_called()
