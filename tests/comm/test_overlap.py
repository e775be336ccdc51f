"""Communication that runs beside compute."""

import pytest

from tests.comm.delays import (
    BLOCKS,
    COMPUTE,
    DelayedCommunicator,
    DelayedReductions,
    step_times,
)


@pytest.mark.slow
def test_gathers_that_take_20_ms_hide_behind_20_ms_of_compute(run_ranks):
    for plain, delayed in run_ranks(step_times, 2, DelayedCommunicator, (2,)):
        assert plain >= 2 * BLOCKS * COMPUTE
        assert delayed <= 1.3 * plain


@pytest.mark.slow
def test_reductions_that_take_20_ms_hide_behind_compute_too(run_ranks):
    for plain, delayed in run_ranks(step_times, 4, DelayedReductions, (2, 2)):
        assert delayed <= 1.3 * plain
