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
from meshard._shared_memory import ring as ring_module
from meshard._shared_memory.communicator import SharedMemoryCommunicator
from meshard._shared_memory.ring import WHY_UNSUPPORTED, Ring, open_ring
from tests.support.against_plain import check_gradients, sharded_and_plain
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.rank_pool import RankError
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES

pytestmark = pytest.mark.skipif(bool(WHY_UNSUPPORTED), reason=WHY_UNSUPPORTED)


def counted(name):
    """Let each rank count the calls of a method of its rings."""
    method = getattr(Ring, name)
    return mock.patch.object(Ring, name, autospec=True, side_effect=method)


def train_both(mesh_shape, policy, schedule):
    """Train by shared memory and by sockets; all numbers must agree, bit for bit."""
    mesh, models = init_device_mesh("cpu", mesh_shape), []
    with counted("publish") as publish:
        for shared in ("1", "0"):
            with mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY=shared), torch.no_grad():
                models.append(shard_blocks(seeded(MlpStack()), mesh, mp_policy=policy))
                models[-1](torch.ones(1, 6))
        num_before = publish.call_count
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
    assert 0 < num_before < publish.call_count


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

    Each method returns the handle of the one, and the result of the other.

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

    def memory(self, make, tensor):
        """Return ``tensor`` in memory from which it is sent without a copy, or as it is."""
        if self.plan.random() < 0.5:
            return tensor
        group = dist.group.WORLD
        return make(tensor.size(-1), tensor.dtype, device=tensor.device, group=group)

    def gather(self, numel):
        source = torch.randn(numel, generator=self.generator)
        theirs = self.sockets.all_gather(source, **self.where)
        theirs.wait()
        if self.plan.random() < 0.5:
            return self.shared.all_gather(source, **self.where), theirs.result
        cpu, group = source.device, dist.group.WORLD
        memory = self.shared.gather_memory(numel, source.dtype, device=cpu, group=group)
        own = memory[group.rank()].copy_(source)
        return self.shared.all_gather(own, memory=memory, **self.where), theirs.result

    def scatter(self, numel):
        dtype, out = self.plan.choice(
            [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
        )
        rows = torch.randn(dist.get_world_size(), numel, generator=self.generator).to(dtype)
        theirs = self.sockets.reduce_scatter(rows.clone(), out, **self.where)
        theirs.wait()
        if self.plan.random() < 0.5:
            cpu, group = rows.device, dist.group.WORLD
            sent = self.shared.send_memory(numel, dtype, device=cpu, group=group)
            rows = sent.copy_(rows)
        return self.shared.reduce_scatter(rows, out, **self.where), theirs.result

    def sum(self, numel):
        ours = torch.randn(numel, generator=self.generator)
        theirs = self.sockets.all_reduce(ours.clone(), **self.where)
        theirs.wait()
        return self.shared.all_reduce(ours, **self.where), theirs.result


def finish(own, handle, theirs):
    """Finish one in a way that this rank draws, or never."""
    time.sleep(own.choice([0.0, 0.0, 0.002 * own.random()]))
    if own.random() < 0.1:
        return
    for _ in range(own.randint(1, 2)):
        handle.wait()
    assert torch.equal(handle.result, theirs)
    assert handle.done()
    if own.random() < 0.5:
        handle.release()


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
    (ring,) = both.shared._rings.values()
    assert not ring._unreleased


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_collectives_in_any_order_agree_with_sockets_and_leave_no_memory(run_ranks, ranks, seed):
    run_ranks(start_and_finish_in_any_order, ranks, seed)


@on_ranks(2)
def test_a_gather_whose_slot_is_needed_keeps_its_result():
    """More gathers are in flight than the ring has room for, and for names."""
    comm, where = SharedMemoryCommunicator(), {"group": dist.group.WORLD, "label": "unit"}
    rank = dist.get_rank()
    handles = [comm.all_gather(torch.full((100,), each + rank), **where) for each in range(200)]
    for each, handle in enumerate(handles):
        handle.wait()
        assert (handle.result == torch.tensor([[each], [each + 1]])).all()


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
    "another host": lambda: patch(ring_module, "_open", lambda *_: None),
    "files": lambda: patch(os, "memfd_create", side_effect=OSError),
    "system": lambda: patch(ring_module, "WHY_UNSUPPORTED", "an example"),
}


@on_ranks(2)
@pytest.mark.parametrize("how", UNABLE)
def test_one_rank_that_cannot_share_keeps_all_to_sockets(how):
    before = num_segments()  # a test before this one may have left a model
    with UNABLE[how]() if dist.get_rank() == 1 else nullcontext():
        if how != "the environment":
            assert open_ring(dist.group.WORLD) is None
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
    comm = SharedMemoryCommunicator()
    comm.all_gather(torch.ones(10), group=dist.group.WORLD, label="unit").wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_gather(torch.ones(10), group=dist.group.WORLD, label="unit").wait()


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

    monkeypatch.setattr(ring_module, "_NAPS_PER_CHECK", 1)
    ring = object.__new__(Ring)
    ring._processes, ring._patience = {1: Ending()}, 60.0
    ring._nap_until(words, 1, 0, "join the collective")


@on_ranks(2)
def test_ranks_that_send_different_sizes_are_told():
    comm, numel = SharedMemoryCommunicator(), 10 + dist.get_rank()
    handle = comm.all_gather(torch.ones(numel), group=dist.group.WORLD, label="unit")
    with pytest.raises(RuntimeError, match=r"(?s)all_gather of unit 'unit'.*same shapes"):
        handle.wait()
    # From here on the ranks differ in where a slot lies, so equal sizes are refused too.
    comm.all_reduce(torch.ones(1000 * numel), group=dist.group.WORLD, label="unit")
    handle = comm.all_gather(torch.ones(4), group=dist.group.WORLD, label="unit")
    with pytest.raises(RuntimeError, match="different collectives"):
        handle.wait()
    dist.barrier()


@on_ranks(2)
def test_a_gather_that_is_not_waited_for_can_be_resharded():
    model, plain = sharded_and_plain(MlpStack(), ())
    for _ in range(3):
        model.unshard(async_op=True)
        model.reshard()
        check_gradients(model, plain, times=1)


@on_ranks(2)
def test_a_gather_has_its_slot_until_it_is_released():
    handle = SharedMemoryCommunicator().all_gather(
        torch.ones(4), group=dist.group.WORLD, label="views"
    )
    with counted("release") as release:
        handle.wait()
        handle.wait()
        assert not release.called
        handle.release()
        handle.release()
        assert release.call_count == 1


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
