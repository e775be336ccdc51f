"""Free ranges of a segment, and the lifetime of its tensors."""

import gc
import os

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard._shared_memory.segment import FirstFit, Segment


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
