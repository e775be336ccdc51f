"""Collectives through shared memory, compared with sockets."""

import gc
import math
import os
import random
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshard import MixedPrecisionPolicy, clip_grad_norm_, describe, fully_shard
from meshard._comm.cpu import WorkCommunicator
from meshard._shared_memory import channel as channel_module
from meshard._shared_memory.channel import Channel, open_channel
from meshard._shared_memory.communicator import SharedMemoryCommunicator
from meshard._shared_memory.segment import WHY_UNSUPPORTED, Segment
from tests.support.against_plain import check_gradients, sharded_and_plain
from tests.support.listed_spans import listed
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.rank_pool import RankError
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES

pytestmark = pytest.mark.skipif(bool(WHY_UNSUPPORTED), reason=WHY_UNSUPPORTED)

NAME = ("all_gather", "unit", 1)


def counted(name):
    """Let each rank count the calls of a method of its channels."""
    method = getattr(Channel, name)
    return mock.patch.object(Channel, name, autospec=True, side_effect=method)


def train_both(mesh_shape, policy, schedule):
    """Train by shared memory and by sockets; all numbers must agree, bit for bit."""
    mesh, models = init_device_mesh("cpu", mesh_shape), []
    with counted("acknowledge") as acknowledge:
        for shared in ("1", "0"):
            with mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY=shared), torch.no_grad():
                models.append(shard_blocks(seeded(MlpStack()), mesh, mp_policy=policy))
                models[-1](torch.ones(1, 6))
        num_before = acknowledge.call_count
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            for letter in schedule:
                x, losses = torch.randn(4, 6, generator=generator), []
                for model in models:
                    model.set_gradient_sync(MODES[letter])
                    losses.append(model(x).float().square().mean())
                    losses[-1].backward()
                assert torch.equal(*losses)
            assert_same(*map(full_grads, models), bitwise=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*map(full_state, models), bitwise=True)
    # Otherwise nothing was shared, and this compares nothing.
    assert 0 < num_before < acknowledge.call_count


POLICIES = {
    "float32": {},
    "bfloat16 compute, float32 wire": {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
    },
    "bfloat16": {"param_dtype": torch.bfloat16},
    "float16 wire": {"reduce_dtype": torch.float16},
}


@spread(mesh_shape=[(2,), (3,), (2, 2)], policy=[*POLICIES], schedule=["F", "NRF"])
def test_training_is_bit_for_bit_that_of_sockets(run_ranks, mesh_shape, policy, schedule):
    mp_policy = MixedPrecisionPolicy(**POLICIES[policy])
    run_ranks(train_both, math.prod(mesh_shape), mesh_shape, mp_policy, schedule)


class Both:
    """Starts the same collectives by shared memory and by sockets.

    Each method returns what is in flight, where its result will be (None: in rows), and the result.

    Args:
        plan: Draws what is done; the same on all ranks.
        generator: Draws the numbers; its own on each.
    """

    def __init__(self, plan, generator):
        self.plan = plan
        self.generator = generator
        self.shared, self.sockets = SharedMemoryCommunicator(), WorkCommunicator()
        self.where = {"group": dist.group.WORLD, "label": "unit"}

    def start(self):
        op = self.plan.choice([self.gather, self.scatter, self.sum])
        return op(self.plan.choice([0, 1, 300, 70_000]))

    def gather(self, numel):
        source = torch.randn(numel, generator=self.generator)
        (rows,) = self.sockets.gather(source, **self.where).rows()
        return self.shared.gather(source, **self.where), None, rows

    def scatter(self, numel):
        dtype, out = self.plan.choice(
            [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
        )
        source = torch.randn(dist.get_world_size(), numel, generator=self.generator).to(dtype)
        as_one = self.plan.random() < 0.5
        rows = self.shared.send_rows(
            numel, dtype, device=source.device, group=dist.group.WORLD, as_one=as_one
        )
        assert len(rows) == (1 if as_one else len(source))
        for block, drawn in zip(rows, source.chunk(len(rows)), strict=True):
            block.copy_(drawn)
        theirs = self.sockets.reduce_scatter([source], out, **self.where)
        theirs.pending.wait()
        ours = self.shared.reduce_scatter(rows, out, **self.where)
        return ours.pending, ours.sum, theirs.sum

    def sum(self, numel):
        ours = torch.randn(numel, generator=self.generator)
        theirs = ours.clone()
        self.sockets.all_reduce(theirs, **self.where).wait()
        return self.shared.all_reduce(ours, **self.where), ours, theirs


def finish(own, in_flight, ours, theirs):
    """Finish one in a way that this rank draws, or never."""
    time.sleep(own.choice([0.0, 0.0, 0.002 * own.random()]))
    if own.random() < 0.1:
        return
    if ours is None:
        ours = torch.cat(in_flight.rows())
        in_flight.release()
    elif own.random() < 0.5 or not in_flight.poll():
        in_flight.wait()
        in_flight.wait()
    assert torch.equal(ours, theirs)


def start_and_finish_in_any_order(seed):
    """Do so in orders that differ between ranks, which also dawdle."""
    rank, pending = dist.get_rank(), []
    own = random.Random(1000 * seed + rank)
    both = Both(random.Random(seed), torch.Generator().manual_seed(100 * seed + rank))
    for _ in range(60):
        pending.append(both.start())
        while len(pending) > own.randint(0, 5):
            finish(own, *pending.pop(own.randrange(len(pending))))
    pending.clear()
    (channel,) = both.shared._channels.values()
    dist.barrier()
    channel._reclaim()
    assert not channel._allocations and not channel._unacknowledged
    assert channel._free.take(1) == channel_module._START


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_collectives_in_any_order_agree_with_sockets_and_leave_no_memory(run_ranks, ranks, seed):
    run_ranks(start_and_finish_in_any_order, ranks, seed)


@on_ranks(2)
@pytest.mark.slow
def test_messages_may_be_more_than_there_are_words_for():
    """The segment does not grow, though many messages are never heard."""
    channel = open_channel(dist.group.WORLD)
    rank, sizes = dist.get_rank(), set()
    for count in range(3 * channel_module._MESSAGES):
        message = channel.publish(torch.full((1000,), float(count + rank)), NAME)
        if count % 100 == 0:
            heard = channel.receive(message, 1 - rank, 1000, torch.float32)
            assert (heard == count + 1 - rank).all()
        channel.acknowledge(message)
        if count > channel_module._MESSAGES:
            sizes.add(os.fstat(channel._own.descriptor).st_size)
    assert len(sizes) == 1


@on_ranks(2, timeout=30)
def test_a_message_that_is_never_heard_is_told_and_not_waited_for():
    """Start one message that nobody waits for, and more than there are words for."""
    channel = open_channel(dist.group.WORLD)
    channel.publish(torch.ones(10), NAME)
    for _ in range(channel_module._MESSAGES - 1):
        channel.acknowledge(channel.publish(torch.ones(10), NAME))
    with pytest.raises(RuntimeError, match=r"has not been waited for, and 4096 have been started"):
        channel.publish(torch.ones(10), NAME)
    channel.acknowledge(0)
    dist.barrier()
    message = channel.publish(torch.ones(10), NAME)
    assert (channel.receive(message, 1 - dist.get_rank(), 10, torch.float32) == 1.0).all()


@on_ranks(2)
@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_groups_of_gloo_share_however_they_were_named(backend):
    group = dist.new_group([0, 1], backend=backend)
    model = fully_shard(seeded(MlpStack()), DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(2, 6)).sum().backward()
    assert "shared memory: on" in str(describe(model))
    dist.destroy_process_group(group)


def num_segments():
    """Return how many open files of this process are shared memory."""
    links = Path("/proc/self/fd").iterdir()
    return sum("memfd:meshard" in os.path.realpath(link) for link in links)


patch = mock.patch.object
UNABLE = {
    "the environment": lambda: mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY="0"),
    "another host": lambda: patch(Segment, "open", side_effect=OSError),
    "another process of that number": lambda: patch(Segment, "open", lambda *_: Segment.create(1)),
    "files": lambda: patch(os, "memfd_create", side_effect=OSError),
    "system": lambda: patch(channel_module, "WHY_UNSUPPORTED", "an example"),
}


@on_ranks(2)
@pytest.mark.parametrize("how", UNABLE)
def test_one_rank_that_cannot_share_keeps_all_to_sockets(how):
    before = num_segments()  # a test before this one may have left a model
    with UNABLE[how]() if dist.get_rank() == 1 else nullcontext():
        if how != "the environment":
            assert open_channel(dist.group.WORLD) is None
        model, plain = sharded_and_plain(MlpStack(), ())
        check_gradients(model, plain)
        assert describe(model).splitlines()[-1].startswith("shared memory: off: ")
        assert num_segments() == before


@on_ranks(2)
def test_a_model_that_is_deleted_leaves_no_segment():
    gc.collect()
    before, named = num_segments(), set(os.listdir("/dev/shm"))
    model = fully_shard(seeded(MlpStack()), init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 6)).sum().backward()
    assert num_segments() > before
    assert set(os.listdir("/dev/shm")) <= named  # nothing has a name
    gc.disable()
    try:
        del model
        assert num_segments() == before
    finally:
        gc.enable()


def one_dies():
    channel = open_channel(dist.group.WORLD)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.publish(torch.ones(10), NAME)
    channel.receive(0, 1, 10, torch.float32)


def test_a_rank_that_dies_is_named(run_ranks):
    with pytest.raises(RankError) as caught:
        run_ranks(one_dies, 2)
    assert "rank 1 of the group has ended and will not join the collective" in str(caught.value)
    assert "it had fewer batches or microbatches" in str(caught.value)


def test_a_rank_that_publishes_and_then_ends_is_not_missed(monkeypatch):
    words = [0]

    class Ending:
        @property
        def has_ended(self):
            words[0] = 1  # the last thing that it does
            return True

    monkeypatch.setattr(channel_module, "_NAPS_PER_CHECK", 1)
    channel = object.__new__(Channel)
    channel._processes, channel._patience = {1: Ending()}, 60.0
    channel._nap_until(words, 0, 0, 1, "join the collective")


@on_ranks(2)
@pytest.mark.slow
def test_ranks_that_send_different_sizes_are_told():
    channel, numel = open_channel(dist.group.WORLD), 10 + dist.get_rank()
    channel.publish(torch.ones(numel), NAME)
    with pytest.raises(RuntimeError, match=r"all_gather of unit 'unit' .* same shapes"):
        channel.receive(0, 1 - dist.get_rank(), numel, torch.float32)


@on_ranks(2)
def test_a_gather_that_is_not_waited_for_can_be_resharded():
    model, plain = sharded_and_plain(MlpStack(), ())
    for _ in range(3):
        model.unshard(async_op=True)
        model.reshard()
        check_gradients(model, plain, times=1)


@on_ranks(2)
def test_rows_are_acknowledged_when_they_are_released():
    """``rows`` acknowledges nothing: they are read until ``release``."""
    source, where = torch.ones(4), {"group": dist.group.WORLD, "label": "views"}
    gather = SharedMemoryCommunicator().gather(source, **where)
    with counted("acknowledge") as acknowledge:
        gather.rows()
        gather.rows()
        assert not acknowledge.called
        gather.release()
        assert acknowledge.call_count == 1


@on_ranks(2)
@pytest.mark.parametrize("shared", ["0", "1"])
def test_the_default_device_of_torch_does_not_matter(shared):
    batch = torch.ones(2, 6)
    with mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY=shared):
        model, plain = sharded_and_plain(MlpStack(), ())
        torch.set_default_device("meta")
        try:
            check_gradients(model, plain, lambda each, _: each(batch).sum(), times=1)
            clip_grad_norm_(model.parameters(), 1.0)
        finally:
            torch.set_default_device(None)


@on_ranks(2)
def test_a_trace_sees_collectives_end_when_this_rank_has_read_them():
    comm, group = SharedMemoryCommunicator(), dist.group.WORLD
    with listed() as recorder:
        gathering = comm.gather(torch.ones(4), group=group, label="layer")
        gathering.rows()
        assert recorder.names == ["begin all_gather", "ends later", "leave all_gather"]
        gathering.release()
        assert recorder.names[3:] == ["end", "waited"]
        dropped = comm.gather(torch.ones(4), group=group, label="layer")
        dropped.abandon()
        assert recorder.names[5:] == ["begin all_gather", "ends later", "leave all_gather", "end"]
