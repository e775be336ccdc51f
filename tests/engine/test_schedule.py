"""The recorded order of units, which predicts the next step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshard._engine.schedule import StepSchedule

ROOT, A, B, C = range(4)
TREE = (ROOT, [(A, []), (B, []), (C, [])])


def run(schedule, tree):
    """Run a forward given as nested ``(unit, [children])``; return predictions and calls."""
    predicted, calls = [], []

    def visit(node):
        unit, children = node
        call = schedule.enter(unit)
        predicted.append(schedule.next_in_forward())
        for child in children:
            visit(child)
        schedule.exit(call)
        calls.append(call)

    schedule.begin_forward()
    visit(tree)
    return predicted, calls


@pytest.mark.parametrize(
    ("trees", "predicted"),
    [
        ([TREE], [None] * 4),
        ([TREE, TREE], [A, B, C, None]),
        ([TREE, (ROOT, [(A, []), (C, [])])], [A, B, None]),
        ([(A, [(B, [])]), (C, []), TREE] * 2, [A, B, C, None]),
        ([(A, [(B, [])]), (C, []), TREE, (A, [(B, [])])], [B, None]),
    ],
    ids=["the first", "the same again", "a unit is skipped", "parts in turn", "a part again"],
)
def test_a_forward_follows_the_last_one_that_began_alike(trees, predicted):
    schedule = StepSchedule()
    assert [run(schedule, tree)[0] for tree in trees][-1] == predicted


@given(entries=st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=2, max_size=4))
def test_any_order_repeated_once_is_predicted_in_full(entries):
    schedule = StepSchedule()
    for order in [*entries, entries[-1]]:
        predicted, _ = run(schedule, (ROOT, [(unit, []) for unit in order]))
    assert predicted == [*entries[-1], None]


def test_an_interrupted_pass_leaves_the_prediction_as_it_was():
    schedule = StepSchedule()
    run(schedule, TREE)
    schedule.begin_forward()
    schedule.enter(ROOT)
    schedule.enter(A)
    schedule.forget()
    assert run(schedule, TREE)[0] == [A, B, C, None]


def test_backward_follows_the_exits_of_its_own_forward_reversed():
    schedule = StepSchedule()
    _, calls = run(schedule, TREE)
    first = schedule.current
    run(schedule, (ROOT, [(C, [])]))  # a later pass changes nothing
    assert [call.unit for call in reversed(calls)] == [ROOT, C, B, A]
    assert [first.next_in_backward(call) for call in reversed(calls)] == [C, B, A, None]


def over(schedule, call, backward=0):
    of = schedule.current
    of.open(backward)
    return list(of.pop_over(lambda first: first.entered > call.exited))


def test_later_units_are_over_when_an_earlier_one_begins_backward():
    schedule = StepSchedule()
    _, (a, b, c, root) = run(schedule, TREE)
    assert [over(schedule, call) for call in (root, c, b, b, a)] == [[], [], [C], [], [B]]
    assert over(schedule, a, backward=1) == [C, B]  # in each backward; b's output was not used


def test_what_is_inside_is_over_before_what_is_around_it():
    schedule = StepSchedule()
    _, calls = run(schedule, (ROOT, [(A, []), (B, [(C, [])])]))
    assert over(schedule, calls[0]) == [C, B]


def test_a_unit_used_again_earlier_is_not_over():
    schedule = StepSchedule()
    _, calls = run(schedule, (ROOT, [(A, []), (B, []), (A, [])]))
    assert over(schedule, calls[1]) == []
