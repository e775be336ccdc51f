"""Programs in which something was wrong once: see ``tests.regressions.corpus``."""

import pytest

from tests.regressions.corpus import PROGRAMS, UNMENDED
from tests.support.programs import failure
from tests.support.spread import unmended


@pytest.mark.parametrize(
    "name", [unmended(UNMENDED[name], name) if name in UNMENDED else name for name in PROGRAMS]
)
def test_a_program_that_was_wrong_once(name):
    error = failure(PROGRAMS[name])
    if error is not None:
        raise AssertionError(f"{error}\nTo play and shorten it: run({PROGRAMS[name]!r})") from error
