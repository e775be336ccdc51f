"""Divisors of a reduction, and division."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard.foreach_reduce import divide_, resolve_divisors
from tests.support.spread import spread

factors = st.one_of(
    st.none(), st.sampled_from([0.5, 1.0, 3.0, 300.0]), st.integers(-6, 12).map(lambda k: 2.0**k)
)
wire_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(shards=st.integers(1, 4096), replicas=st.integers(1, 64), factor=factors, dtype=wire_dtypes)
def test_of_the_divide_factor_the_share_of_replicas_is_their_number(
    shards, replicas, factor, dtype
):
    divisors = resolve_divisors(shards, replicas, factor, dtype)
    total = Fraction(shards * replicas if factor is None else factor)
    assert divisors.before_scatter * divisors.after_scatter == total / replicas
    assert divisors.before_all_reduce * divisors.after_all_reduce == replicas


@pytest.mark.parametrize(("ranks", "first"), [(2, 2), (4, 2), (255, 16), (256, 16), (8192, 128)])
def test_float16_is_divided_first_by_a_power_of_two_near_the_root(ranks, first):
    assert resolve_divisors(ranks, 1, None, torch.float16).before_scatter == first


def test_float16_splits_each_groups_share_around_its_own_collective():
    divisors = resolve_divisors(16, 64, None, torch.float16)
    assert divisors == (4.0, 4.0, 8.0, 8.0)


@pytest.mark.parametrize("divisor", [Fraction(3), Fraction(1, 7), Fraction(4, 7), Fraction(3, 2)])
def test_division_rounds_once(divisor):
    values = torch.arange(1.0, 1000.0)
    divided = values.clone()
    divide_(divided, divisor)
    exact = [float(Fraction(value) / divisor) for value in values.tolist()]
    assert torch.equal(divided, torch.tensor(exact, dtype=torch.float64).float())


class OnDevice(torch.Tensor):
    """Values that are not on the CPU, as far as they say."""

    is_cpu = False


@spread(
    dtype=[torch.bfloat16, torch.float16, torch.float32, torch.float64],
    divisor=[Fraction(257), Fraction(1 / 3), Fraction(1001, 3)],
)
def test_a_divisor_keeps_its_digits_off_the_cpu(dtype, divisor):
    values = torch.arange(1.0, 500.0).to(dtype)
    divided = values.clone().as_subclass(OnDevice)
    divide_(divided, divisor)
    assert torch.equal(divided.as_subclass(torch.Tensor), values / float(divisor))


@pytest.mark.parametrize("replicas", range(1, 9))
def test_a_dyadic_factor_is_exact_with_any_number_of_replicas(replicas):
    total = torch.arange(-50.0, 50.0)
    divisors = resolve_divisors(1, replicas, 1.0, torch.float32)
    for divisor in divisors:
        divide_(total, divisor)
    assert torch.equal(total, torch.arange(-50.0, 50.0))


def test_a_number_lies_where_the_other_operand_does():
    values = torch.ones(3)
    with torch.device("meta"):  # as by torch.set_default_device
        divide_(values, Fraction(3))
    assert torch.equal(values, torch.full((3,), 1 / 3))
