"""Buckets: every parameter is in one, of one dtype and not too large."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.insides import partition

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
PARAMS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(DTYPES)), min_size=1, max_size=12)


def made(shapes):
    return [nn.Parameter(torch.empty(numel, dtype=dtype)) for numel, dtype in shapes]


@given(shapes=PARAMS, cap=st.integers(1, 400))
def test_buckets_hold_every_parameter_once_in_one_dtype(shapes, cap):
    params = made(shapes)
    buckets = partition(params, cap)
    for bucket in buckets:
        assert len({params[place].dtype for place in bucket}) == 1
        assert len(bucket) == 1 or sum(params[place].nbytes for place in bucket) <= cap
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(params)))


def test_the_first_bucket_is_small():
    params = made([(2**17, torch.float32)] * 8)  # half a MiB each
    assert partition(params, 4 * 2**20) == [[0, 1], [2, 3, 4, 5, 6, 7]]
