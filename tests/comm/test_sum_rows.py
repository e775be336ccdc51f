"""Sums of the rows of several ranks, signs of zero included."""

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
    keep_signs=st.booleans(),
    is_small=st.booleans(),
)
def test_sums_of_integers_are_exact_and_zeros_keep_their_sign(
    count, numel, dtype, keep_signs, is_small
):
    rows = torch.randint(-2, 3, (count, numel)).to(dtype)
    rows[rows == 0] = torch.tensor(-0.0, dtype=dtype)
    rows[:, ::3] = -0.0
    rows[0, ::6] = 0.0
    expected = [sum(int(x) for x in column) for column in rows.t()]
    is_negative_zero = [bool((c == 0).all() and torch.signbit(c).all()) for c in rows.t()]
    output = torch.full((numel,), float("nan"), dtype=WIDE[dtype])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_SMALL", 2**19 if is_small else 0)
        cpu.sum_rows(output, rows, keep_signs=keep_signs)
    assert output.tolist() == expected
    if keep_signs:
        assert [bool(s) for s in torch.signbit(output) & (output == 0)] == is_negative_zero


@given(count=st.integers(3, 33), numel=st.integers(1, 70), seed=st.integers(0, 99))
def test_asking_for_signs_changes_no_other_bit(count, numel, seed):
    rows = torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))
    with_signs, without = torch.empty(numel), torch.empty(numel)
    cpu.sum_rows(with_signs, rows.clone(), keep_signs=True)
    cpu.sum_rows(without, rows.clone(), keep_signs=False)
    assert torch.equal(with_signs, without)
    for total, column in zip(without.tolist(), rows.t().tolist(), strict=True):
        # Each addition rounds by half an ulp of what the terms can add up to.
        bound = count * 2.0**-24 * sum(abs(x) for x in column)
        assert abs(Fraction(total) - sum(map(Fraction, column))) <= bound
