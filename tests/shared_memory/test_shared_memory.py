"""Collectives through shared memory, compared with sockets."""

import gc
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshard
from meshard import describe, fully_shard
from meshard._comm.cpu import WorkCommunicator
from meshard._shared_memory import channel as channel_module
from meshard._shared_memory.channel import open_channel
from meshard._shared_memory.communicator import SharedMemoryCommunicator
from meshard._shared_memory.segment import WHY_UNSUPPORTED, Segment
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.rank_pool import RankError
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES

pytestmark = pytest.mark.skipif(bool(WHY_UNSUPPORTED), reason=WHY_UNSUPPORTED)

NAME = ("all_gather", "unit", 1)


def model_on(mesh, policy, is_shared, monkeypatch):
    """Return a sharded model and how many of its groups share memory, after its first forward."""
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", str(int(is_shared)))
    model = seeded(MlpStack())
    shard_blocks(model, mesh, mp_policy=policy)
    with torch.no_grad():
        model(torch.ones(1, 6))
    return model


def train_both(mesh_shape, policy, schedule):
    """Train by shared memory and by sockets; all numbers must agree, bit for bit."""
    mesh = init_device_mesh("cpu", mesh_shape)
    counts = []
    count = channel_module.Channel.acknowledge
    channel_module.Channel.acknowledge = lambda self, m: (counts.append(m), count(self, m))
    try:
        with pytest.MonkeyPatch.context() as patch:
            models = [model_on(mesh, policy, shared, patch) for shared in (True, False)]
            heard = len(counts)
            optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(3):
                for sync in schedule:
                    x = torch.randn(4, 6, generator=generator)
                    losses = []
                    for model in models:
                        model.set_gradient_sync(MODES[sync])
                        losses.append(model(x).float().square().mean())
                        losses[-1].backward()
                    assert torch.equal(*losses)
                assert_same(full_grads(models[0]), full_grads(models[1]), bitwise=True)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same(full_state(models[0]), full_state(models[1]), bitwise=True)
    finally:
        channel_module.Channel.acknowledge = count
    return heard, len(counts)


POLICIES = {
    "float32": meshard.MixedPrecisionPolicy(),
    "bfloat16 compute, float32 wire": meshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "bfloat16": meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "float16 wire": meshard.MixedPrecisionPolicy(reduce_dtype=torch.float16),
}


@spread(mesh_shape=[(2,), (3,), (2, 2)], policy=[*POLICIES], schedule=["F", "NRF"])
def test_training_is_bit_for_bit_that_of_sockets(run_ranks, mesh_shape, policy, schedule):
    ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    for heard, later in run_ranks(train_both, ranks, mesh_shape, POLICIES[policy], schedule):
        assert 0 < heard < later  # or nothing was shared, and this compares nothing


class Both:
    """Starts the same collectives by shared memory and by sockets.

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
        """Return what is on its way, where its result will be (None: in rows), and the result."""
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


def finish(own, mine, ours, theirs):
    """Finish one in a way that this rank draws, or never."""
    time.sleep(own.choice([0.0, 0.0, 0.002 * own.random()]))
    if own.random() < 0.1:
        return
    if ours is None:
        ours = torch.cat(mine.rows())
        mine.release()
    elif own.random() < 0.5 or not mine.poll():
        mine.wait()
        mine.wait()
    assert torch.equal(ours, theirs)


def any_order(seed):
    """Start and finish collectives in orders that differ between ranks, which also dawdle."""
    rank, pending = dist.get_rank(), []
    own = random.Random(1000 * seed + rank)
    both = Both(random.Random(seed), torch.Generator().manual_seed(100 * seed + rank))
    for _ in range(60):
        pending.append(both.start())
        while len(pending) > own.randint(0, 5):
            finish(own, *pending.pop(own.randrange(len(pending))))
    pending.clear()
    (met,) = both.shared._channels.values()
    dist.barrier()
    met._reclaim()
    return (
        len(met._allocations),
        len(met._unacknowledged),
        met._free.take(1) == channel_module._START,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_collectives_in_any_order_agree_with_sockets_and_leave_no_memory(run_ranks, ranks, seed):
    assert run_ranks(any_order, ranks, seed) == [(0, 0, True)] * ranks


def many_messages():
    """Pass on more messages than there are words for, of which many are never heard."""
    met = open_channel(dist.group.WORLD)
    other = 1 - dist.get_rank()
    sizes = set()
    for count in range(3 * channel_module._MESSAGES):
        message = met.publish(torch.full((1000,), float(count + dist.get_rank())), NAME)
        if count % 100 == 0:
            heard = met.receive(message, other, 1000, torch.float32)
            assert (heard == count + other).all()
        met.acknowledge(message)
        if count > channel_module._MESSAGES:
            sizes.add(os.fstat(met._own.descriptor).st_size)
    return len(sizes)


@pytest.mark.slow
def test_messages_may_be_more_than_there_are_words_for(run_ranks):
    assert run_ranks(many_messages, 2) == [1, 1]  # the segment does not grow


@on_ranks(2, timeout=30)
def test_a_message_that_is_never_heard_is_told_and_not_waited_for():
    """Start one message that nobody waits for, and more than there are words for."""
    met = open_channel(dist.group.WORLD)
    met.publish(torch.ones(10), NAME)
    for _ in range(channel_module._MESSAGES - 1):
        met.acknowledge(met.publish(torch.ones(10), NAME))
    with pytest.raises(RuntimeError, match=r"has not been waited for, and 4096 have been started"):
        met.publish(torch.ones(10), NAME)
    met.acknowledge(0)
    dist.barrier()
    message = met.publish(torch.ones(10), NAME)
    assert (met.receive(message, 1 - dist.get_rank(), 10, torch.float32) == 1.0).all()


@on_ranks(2)
@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_groups_of_gloo_share_however_they_were_named(backend):
    group = dist.new_group([0, 1], backend=backend)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = meshard.fully_shard(seeded(MlpStack()), mesh)
    model(torch.ones(2, 6)).sum().backward()
    assert "shared memory: on" in str(meshard.describe(model))
    dist.destroy_process_group(group)


@on_ranks(2)
@pytest.mark.parametrize("how", ["env", "host", "token", "files", "system"])
def test_one_rank_that_cannot_share_keeps_all_to_sockets(how):
    mesh = init_device_mesh("cpu", (2,))
    before = descriptors()  # a test before this one may have left a model
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1 and how == "env":
            patch.setenv("MESHARD_SHARED_MEMORY", "0")
        elif dist.get_rank() == 1 and how == "host":
            patch.setattr(Segment, "open", lambda process, descriptor: os.open("/none", 0))
        elif dist.get_rank() == 1 and how == "token":  # a process of that number on another host
            patch.setattr(Segment, "open", lambda process, descriptor: Segment.create(1))
        elif dist.get_rank() == 1 and how == "files":
            patch.setattr(os, "memfd_create", lambda *_: os.open("/none", 0))
        elif dist.get_rank() == 1:
            patch.setattr(channel_module, "WHY_UNSUPPORTED", "it is another")
        if how != "env":
            assert open_channel(dist.group.WORLD) is None
        model = meshard.fully_shard(seeded(MlpStack()), mesh)
        model(torch.ones(2, 6)).sum().backward()
        assert descriptors() == before
    plain = seeded(MlpStack())
    plain(torch.ones(2, 6)).sum().backward()
    assert_same(full_grads(model), full_grads(plain))


def descriptors():
    """Return the open files of this process that are shared memory."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except OSError:
            continue  # closed meanwhile
    return [name for name in found if "memfd:meshard" in name]


def used_and_deleted():
    gc.collect()
    before = len(descriptors())
    named = set(os.listdir("/dev/shm"))
    model = meshard.fully_shard(seeded(MlpStack()), init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 6)).sum().backward()
    during = len(descriptors())
    assert set(os.listdir("/dev/shm")) <= named  # nothing has a name
    gc.disable()
    try:
        del model
        return before, during > before, len(descriptors()) - before
    finally:
        gc.enable()


def test_a_model_that_is_deleted_leaves_no_segment(run_ranks):
    for _, during, after in run_ranks(used_and_deleted, 2):
        assert during and not after


def one_dies():
    met = open_channel(dist.group.WORLD)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    met.publish(torch.ones(10), NAME)
    met.receive(0, 1, 10, torch.float32)


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

    monkeypatch.setattr(channel_module, "_EAGER", 0)
    monkeypatch.setattr(channel_module, "_NAPS_PER_CHECK", 1)
    met = object.__new__(channel_module.Channel)
    met._processes, met._patience = {1: Ending()}, 60.0
    met._nap_until(words, 0, 0, 1, "join the collective")


@on_ranks(2)
@pytest.mark.slow
def test_ranks_that_send_different_sizes_are_told():
    met = open_channel(dist.group.WORLD)
    met.publish(torch.ones(10 + dist.get_rank()), NAME)
    with pytest.raises(RuntimeError, match=r"all_gather of unit 'unit' .* same shapes"):
        met.receive(0, 1 - dist.get_rank(), 10 + dist.get_rank(), torch.float32)


@on_ranks(2)
def test_a_gather_that_is_not_waited_for_can_be_resharded():
    model, plain = meshard.fully_shard(seeded(MlpStack())), seeded(MlpStack())
    for _ in range(3):
        model.unshard(async_op=True)
        model.reshard()
        for each in (model, plain):
            each.zero_grad()
            each(torch.ones(2, 6)).sum().backward()
        assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_a_wait_has_an_end():
    met = open_channel(dist.group.WORLD)
    met._patience = 0.2
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 .* did not join the collective in \d s"):
            met.receive(0, 1, 10, torch.float32)
    dist.barrier()


@on_ranks(2)
def test_rows_are_acknowledged_when_they_are_released():
    """``rows`` acknowledges nothing: they are read until ``release``."""
    group = dist.group.WORLD
    source = torch.ones(4)
    gather = SharedMemoryCommunicator().gather(source, group=group, label="views")
    gather.rows()
    told = []
    gather._channel.acknowledge = told.append
    gather.rows()
    assert told == []
    gather.release()
    assert len(told) == 1


def step_under_another_default_device():
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            model, plain = meshard.fully_shard(seeded(MlpStack())), seeded(MlpStack())
            batch = torch.ones(2, 6)
        for each in (model, plain):
            each(batch).sum().backward()
        assert_same(full_grads(model), full_grads(plain))
        meshard.clip_grad_norm_(model.parameters(), 1.0)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_the_default_device_of_torch_does_not_matter(run_ranks, monkeypatch, shared):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", shared)
    run_ranks(step_under_another_default_device, 2)


@on_ranks(2)
def test_one_rank_that_is_unable_is_a_reason():
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(channel_module, "WHY_UNSUPPORTED", "an example")
        layer = fully_shard(torch.nn.Linear(4, 4))
        layer(torch.ones(1, 4))
    assert describe(layer).splitlines()[-1].startswith("shared memory: off: ")
