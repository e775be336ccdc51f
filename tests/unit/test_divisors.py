"""Is every reduction divided by the divide factor, exactly once?"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard._comm.foreach_reduce import divide_, resolve_divisors

factors = st.one_of(
    st.none(), st.sampled_from([0.5, 1.0, 3.0, 300.0]), st.integers(-6, 12).map(lambda k: 2.0**k)
)
wire_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(shards=st.integers(1, 4096), replicas=st.integers(1, 64), factor=factors, dtype=wire_dtypes)
def test_the_product_is_the_divide_factor(shards, replicas, factor, dtype):
    divisors = resolve_divisors(shards, replicas, factor, dtype)
    total = Fraction(shards * replicas if factor is None else factor)
    product = Fraction(1)
    for divisor in divisors:
        product *= Fraction(divisor)
    if factor is None or dtype != torch.float16:
        assert abs(product / total - 1) < Fraction(1, 2**50)
    assert abs(product / total - 1) < Fraction(1, 2**48)


@given(shards=st.integers(1, 64), replicas=st.integers(1, 64), factor=factors)
def test_a_partial_is_the_mean_over_the_shard_group_by_default(shards, replicas, factor):
    divisors = resolve_divisors(shards, replicas, None, torch.float32)
    assert divisors.before_scatter * divisors.after_scatter == shards
    assert divisors.before_all_reduce * divisors.after_all_reduce == replicas


@pytest.mark.parametrize(("ranks", "first"), [(2, 1), (4, 2), (255, 16), (256, 16), (8192, 64)])
def test_float16_is_divided_first_by_a_power_of_two_near_the_root(ranks, first):
    # log2(2) / 2 = 0.5 and log2(8192) / 2 = 6.5 round to even.
    assert resolve_divisors(ranks, 1, None, torch.float16).before_scatter == first


def test_float16_splits_each_groups_share_around_its_own_collective():
    divisors = resolve_divisors(16, 64, None, torch.float16)
    assert divisors == (4.0, 4.0, 8.0, 8.0)


def test_division_rounds_once():
    values = torch.arange(1.0, 1000.0)
    divided = values.clone()
    divide_(divided, 3.0)
    for value, quotient in zip(values.tolist(), divided, strict=True):
        assert quotient == torch.tensor(value / 3.0, dtype=torch.float64).float()
