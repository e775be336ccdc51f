"""Free ranges of a segment, and the lifetime of its tensors."""

import errno
import fcntl
import gc
import os
import resource
import stat

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshard._shared_memory.channel import _TOKEN_WORD, _open, open_channel
from meshard._shared_memory.segment import FirstFit, Segment
from tests.support.ranks import on_ranks


@given(sizes=st.lists(st.integers(1, 9), max_size=30), data=st.data())
def test_ranges_never_overlap_and_what_is_given_back_is_joined(sizes, data):
    free, taken, end = FirstFit(100), {}, 100
    for size in sizes:
        fits, most = free.fits(size), end
        begin = free.take(size)
        end = max(end, begin + size)
        assert begin >= 100 and fits == (end == most)
        for other, length in taken.items():
            assert begin + size <= other or other + length <= begin
        taken[begin] = size
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(taken)))
            free.give(gone, taken.pop(gone))
    for begin, size in sorted(taken.items(), key=lambda each: data.draw(st.integers())):
        free.give(begin, size)
    assert free.take(end - 100) == 100  # all of it is one range again


@pytest.mark.slow
def test_what_is_lent_is_let_go_of_with_the_last_view():
    segment, gone = Segment.create(1000), []
    tensor, watch = segment.allocate(64, 100, torch.float32, gone.append)
    part = tensor.view(10, 10)[3:5]
    part.fill_(7.0)
    del tensor
    gc.collect()
    assert not gone and watch() is not None
    assert (segment.view(64 + 4 * 30, 20, torch.float32) == 7.0).all()
    del part
    assert gone and watch() is None


def test_a_segment_grows_and_what_looks_into_it_stays():
    ours = Segment.create(1000)
    theirs = Segment(os.dup(ours.descriptor))
    before = ours.view(0, 10, torch.float32).fill_(1.0)
    end = 2**26
    ours.reserve(end)
    ours.view(end - 40, 10, torch.float32).fill_(2.0)
    assert (theirs.view(end - 40, 10, torch.float32) == 2.0).all()
    before.fill_(3.0)
    assert (theirs.view(0, 10, torch.float32) == 3.0).all()
    assert ours.view(0, 0, torch.float32).shape == (0,)


def test_nobody_else_opens_a_segment_and_nobody_shrinks_it():
    segment = Segment.create(1000)
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
    segment.reserve(2 * size)
    segment.release_pages(0, size)


@pytest.mark.parametrize("call", ["fchmod", "ftruncate"])
def test_a_segment_that_cannot_be_made_leaves_no_descriptor(monkeypatch, call):
    before = os.listdir("/proc/self/fd")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        Segment.create(1000)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("size", [100, 8 * _TOKEN_WORD + 3])
def test_a_file_of_this_host_that_a_rank_elsewhere_seems_to_name_is_not_opened(tmp_path, size):
    with open(tmp_path / "log", "w+b") as file:
        file.write(bytes(size))
        file.flush()
        assert _open(os.getpid(), file.fileno(), 1) is None


@on_ranks(2)
def test_a_segment_that_cannot_grow_names_the_way_out():
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    channel = open_channel(dist.group.WORLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**25, hard))
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"ulimit -f.* MESHARD_SHARED_MEMORY=0"):
                channel.allocate(2**25, torch.float32)
        # What fits goes on.
        message = channel.publish(torch.ones(10), ("all_gather", "unit", 1))
        assert (channel.receive(message, 1 - dist.get_rank(), 10, torch.float32) == 1.0).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
