"""Random graphs of losses, beside a plain model: see ``tests.support.random_graphs``."""

import pytest
from hypothesis import given

from tests.support.random_graphs import play, programs


@pytest.mark.filterwarnings("ignore")  # of inputs that need no gradient
@given(programs())
def test_a_random_graph_has_the_gradients_of_one_process(program):
    play(program)
