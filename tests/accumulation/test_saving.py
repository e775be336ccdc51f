"""State dicts while a window of accumulation is open."""

import pytest

from tests.support.ones import make, run
from tests.support.threads import run_threads


def fail(_):
    raise ZeroDivisionError


def save_in_a_window():
    model = make()
    run(model, "R", 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"unit '\(root\)' holds gradients .* zero_grad"):
        model.state_dict()
    model.zero_grad()
    saved = model.state_dict()
    loss = model(1.0, 1.0)
    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    return sorted(saved) == sorted(model.state_dict()) == ["a", "b"]


def test_a_checkpoint_in_the_middle_of_a_window_is_refused():
    assert run_threads(save_in_a_window, 4) == [True] * 4
