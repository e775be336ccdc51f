"""The slots of a ring, and the memory behind them."""

import errno
import fcntl
import os
import resource
import stat

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshard._shared_memory import ring as ring_module
from meshard._shared_memory.ring import WHY_UNSUPPORTED, Ring, _create, _open, open_ring
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(bool(WHY_UNSUPPORTED), reason=WHY_UNSUPPORTED)


class Use:
    """A collective that is over at once, or when its slot is needed."""

    def __init__(self, ring, name, *, keep):
        self.ring = ring
        ring.publish(name, self)  # which numbers it
        if not keep:
            ring.release(self.number)

    def give_way(self):
        self.ring.release(self.number)


class Group:
    """Stands in for a process group."""

    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank


def pair_of_rings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])

        class Patience:
            def total_seconds(self):
                return 10.0

        patch.setattr(ring_module, "timeout_of", lambda *_: Patience())
        segment = _create(1)
        return [Ring(segment, [os.getpid()] * 2, Group(rank)) for rank in range(2)]


@given(
    uses=st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=80),
    data=st.data(),
)
def test_no_slot_is_used_again_before_all_ranks_have_released_it(uses, data):
    """One rank publishes, and the other follows as late as it can."""
    one, other = pair_of_rings()
    kept, behind = [], []

    def follow():
        numel, keep, written = behind.pop(0)
        memory = other.take((numel,), torch.uint8)
        assert torch.equal(memory, written)  # nothing has overwritten it since
        use = Use(other, "name", keep=keep)
        if keep:
            kept.append(use)

    for value, (numel, keep) in enumerate(uses):
        while behind and data.draw(st.booleans()):
            follow()
        # ``one`` may take only what ``other`` has released: otherwise it would wait for ever here.
        while not _is_free(one, numel):
            if behind:
                follow()
            else:
                kept.pop(0).give_way()
        memory = one.take((numel,), torch.uint8).fill_(value % 251)
        assert one.take((numel,), torch.uint8).numel() == numel  # may be asked for again
        Use(one, "name", keep=False)
        behind.append((numel, keep, memory.clone()))
    while behind:
        follow()
    assert one._last == other._last


def _is_free(ring, numel):
    """Whether ``take`` would not wait."""

    class Waits(Exception):
        pass

    def wait(*_):
        raise Waits

    slots = ring._slots.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_nap_until", wait)
        patch.setattr(ring_module, "_EAGER", 0)
        try:
            ring.take((numel,), torch.uint8)
        except Waits:
            ring._slots = slots
            return False
    return True


def test_a_segment_grows_and_what_looks_into_it_stays():
    ours = _create(7)
    theirs = ring_module._Segment(os.dup(ours.descriptor))
    before = torch.frombuffer(ours.view(4096, 40), dtype=torch.float32).fill_(1.0)
    end = 2**26
    torch.frombuffer(ours.view(end - 40, 40), dtype=torch.float32).fill_(2.0)
    assert (torch.frombuffer(theirs.view(end - 40, 40), dtype=torch.float32) == 2.0).all()
    before.fill_(3.0)
    assert (torch.frombuffer(theirs.view(4096, 40), dtype=torch.float32) == 3.0).all()


def test_nobody_else_opens_a_segment_and_nobody_shrinks_it():
    segment = _create(7)
    segment.view(0, 2**20)
    size = os.fstat(segment.descriptor).st_size
    assert stat.S_IMODE(os.fstat(segment.descriptor).st_mode) == 0o600
    theirs = os.open(f"/proc/{os.getpid()}/fd/{segment.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(theirs, size - 1)
        with pytest.raises(PermissionError):  # nor keep it from growing
            fcntl.fcntl(theirs, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    finally:
        os.close(theirs)
    segment.view(0, 2 * size)


@pytest.mark.parametrize("call", ["fchmod", "ftruncate"])
def test_a_segment_that_cannot_be_made_leaves_no_descriptor(monkeypatch, call):
    before = os.listdir("/proc/self/fd")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        _create(1)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("size", [3, 100])
def test_a_file_of_this_host_that_a_rank_elsewhere_seems_to_name_is_not_opened(tmp_path, size):
    with open(tmp_path / "log", "w+b") as file:
        file.write(bytes(size))
        file.flush()
        assert _open(os.getpid(), file.fileno(), 1) is None


@on_ranks(2)
def test_a_segment_that_cannot_grow_names_the_way_out():
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ring = open_ring(dist.group.WORLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**25, hard))
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"ulimit -f.* MESHARD_SHARED_MEMORY=0"):
                ring.take((2**25,), torch.float32)
        # What fits goes on.
        slot = ring.take((2, 10), torch.float32)
        slot[ring.rank] = 1.0
        use = Use(ring, "name", keep=True)
        ring.wait(use.number)
        assert (slot == 1.0).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@on_ranks(2)
def test_the_ring_is_bounded_by_its_largest_slot():
    ring, sizes = open_ring(dist.group.WORLD), []
    for count in range(300):
        slot = ring.take((2, 1 << 18), torch.float32)
        slot[ring.rank] = float(count + ring.rank)
        use = Use(ring, "name", keep=True)
        ring.wait(use.number)
        assert (slot[1 - ring.rank] == count + 1 - ring.rank).all()
        ring.release(use.number)
        sizes.append(os.fstat(ring._segment.descriptor).st_blocks * 512 >> 20)
    assert max(sizes) == 3 * 2
