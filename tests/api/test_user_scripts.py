"""Sequences of what users do, against an exact model: see ``tests.support.scripts``."""

import pytest
from hypothesis import given

from tests.support.scripts import play, scripts
from tests.support.strategies import num_ranks
from tests.support.threads import run_threads


@pytest.mark.slow
@given(script=scripts())
def test_any_script_agrees_with_the_exact_model(script):
    mesh, operations = script
    run_threads(play, num_ranks(mesh), mesh, operations)
