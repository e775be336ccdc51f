"""The recorded order of units, which predicts the next step."""

from hypothesis import given
from hypothesis import strategies as st

from meshard._engine.schedule import StepSchedule

ROOT, A, B, C = range(4)


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


TREE = (ROOT, [(A, []), (B, []), (C, [])])


def test_the_first_forward_predicts_nothing():
    predicted, _ = run(StepSchedule(), TREE)
    assert predicted == [None] * 4


def test_the_second_forward_follows_the_first():
    schedule = StepSchedule()
    run(schedule, TREE)
    predicted, _ = run(schedule, TREE)
    assert predicted == [A, B, C, None]


def test_backward_follows_the_exits_of_its_own_forward_reversed():
    schedule = StepSchedule()
    _, calls = run(schedule, TREE)
    following = [schedule.current.next_in_backward(call) for call in reversed(calls)]
    assert [call.unit for call in reversed(calls)] == [ROOT, C, B, A]
    assert following == [C, B, A, None]


def test_backward_of_one_pass_ignores_a_later_pass():
    schedule = StepSchedule()
    _, calls = run(schedule, (ROOT, [(A, []), (B, [])]))
    first = schedule.current
    run(schedule, (ROOT, [(C, [])]))
    assert first.next_in_backward(calls[1]) == A


def test_a_unit_called_twice_is_followed_at_both_places():
    schedule = StepSchedule()
    tree = (ROOT, [(A, []), (B, []), (A, []), (C, [])])
    run(schedule, tree)
    predicted, _ = run(schedule, tree)
    assert predicted == [A, B, A, C, None]


def test_prediction_is_taken_up_again_after_a_skipped_unit():
    schedule = StepSchedule()
    run(schedule, TREE)
    predicted, _ = run(schedule, (ROOT, [(A, []), (C, [])]))
    assert predicted == [A, B, None]


def test_an_interrupted_pass_leaves_the_prediction_as_it_was():
    schedule = StepSchedule()
    run(schedule, TREE)
    schedule.begin_forward()
    schedule.enter(ROOT)
    schedule.enter(A)
    schedule.forget()
    predicted, _ = run(schedule, TREE)
    assert predicted == [A, B, C, None]


def test_parts_that_are_called_in_turn_are_each_predicted():
    schedule = StepSchedule()
    parts = [(A, [(B, [])]), (C, []), TREE]
    first = [run(schedule, part)[0] for part in parts]
    second = [run(schedule, part)[0] for part in parts]
    assert first == [[None] * 2, [None], [None] * 4]
    assert second == [[B, None], [None], [A, B, C, None]]


def over(schedule, call, backward=0):
    of = schedule.current
    of.open(backward)
    return list(of.pop_over(lambda first: first.entered > call.exited))


def test_later_units_are_over_when_an_earlier_one_begins_backward():
    schedule = StepSchedule()
    _, (a, b, c, root) = run(schedule, TREE)
    assert over(schedule, root) == []
    assert over(schedule, c) == []
    assert over(schedule, b) == [C]
    assert over(schedule, b) == []  # each is returned once
    assert over(schedule, a) == [B]
    assert over(schedule, a, backward=1) == [C, B]  # in each backward


def test_a_unit_whose_output_was_not_used_is_over_too():
    schedule = StepSchedule()
    _, (a, _, _, root) = run(schedule, TREE)
    assert over(schedule, root) == []
    assert over(schedule, a) == [C, B]


def test_what_is_inside_is_over_before_what_is_around_it():
    schedule = StepSchedule()
    _, calls = run(schedule, (ROOT, [(A, []), (B, [(C, [])])]))
    a = next(call for call in calls if call.unit == A)
    assert over(schedule, a) == [C, B]


def test_a_unit_used_again_earlier_is_not_over():
    schedule = StepSchedule()
    _, calls = run(schedule, (ROOT, [(A, []), (B, []), (A, [])]))
    b = next(call for call in calls if call.unit == B)
    assert over(schedule, b) == []


@given(entries=st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=2, max_size=4))
def test_any_order_repeated_once_is_predicted_in_full(entries):
    schedule = StepSchedule()
    for order in entries:
        run(schedule, (ROOT, [(unit, []) for unit in order]))
    last = entries[-1]
    predicted, _ = run(schedule, (ROOT, [(unit, []) for unit in last]))
    assert predicted == [*last, None]
