"""Jobs that start and end while the machine is busy."""

import pytest

from tests.shared_memory.start_and_end import outcomes


@pytest.mark.slow
def test_every_rank_ends_cleanly():
    """``python -m tests.shared_memory.start_and_end 200 4`` has more of them, on a busy machine."""
    found = outcomes(3, num_busy=0)
    assert sum(found.values()) == 3
    assert {outcome.rpartition(": ")[2] for outcome in found} == {"clean"}, found
