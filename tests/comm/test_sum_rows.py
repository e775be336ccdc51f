"""Sums of the rows of several ranks."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard._comm import cpu

WIDE = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


@given(
    count=st.integers(2, 40),
    numel=st.integers(1, 70),
    dtype=st.sampled_from(sorted(WIDE, key=str)),
    is_small=st.booleans(),
)
def test_sums_of_integers_are_exact(count, numel, dtype, is_small):
    rows = torch.randint(-2, 3, (count, numel)).to(dtype)
    expected = [sum(int(x) for x in column) for column in rows.t()]
    output = torch.full((numel,), float("nan"), dtype=WIDE[dtype])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_SMALL", 2**19 if is_small else 0)
        cpu.sum_rows(output, rows)
    assert output.tolist() == expected


@given(count=st.integers(3, 33), numel=st.integers(1, 70), seed=st.integers(0, 99))
def test_each_addition_rounds_once(count, numel, seed):
    rows = torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))
    sums = torch.empty(numel)
    cpu.sum_rows(sums, rows.clone())
    for total, column in zip(sums.tolist(), rows.t().tolist(), strict=True):
        # Each addition rounds by half an ulp of what the terms can add up to.
        bound = count * 2.0**-24 * sum(abs(x) for x in column)
        assert abs(Fraction(total) - sum(map(Fraction, column))) <= bound
