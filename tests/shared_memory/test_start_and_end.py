"""Jobs that start and end while the machine is busy."""

import pytest

from tests.support.start_and_end import outcomes


@pytest.mark.parametrize(
    ("count", "num_busy"),
    [
        pytest.param(3, 0, marks=pytest.mark.slow),
        pytest.param(200, 4, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_every_rank_ends_cleanly(count, num_busy):
    found = outcomes(count, num_busy)
    assert sum(found.values()) == count
    assert {outcome.rpartition(": ")[2] for outcome in found} == {"clean"}, found
