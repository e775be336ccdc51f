"""The program of a backward: its order, its cursor, and what a recorder remembers of passes."""

import sys
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshard._engine.program import Call, Event, Pass, Recorder

UNITS = range(4)
calls = st.tuples(st.sampled_from(UNITS), st.booleans())  # a unit, and whether grad is enabled
# A forward: calls in the order in which they begin. None ends the innermost one, but not the first,
# which is around all others and ends last.
forwards = st.builds(lambda root, inner: [root, *inner], calls, st.lists(st.none() | calls))


class Recorded(NamedTuple):
    """A pass, and when each of its calls began and ended. A node was made at each moment."""

    this: Pass
    began: dict[Call, int]
    ended: dict[Call, int]


def record(forward, recorder=None):
    recorder = recorder or Recorder()
    recorder.begin(0)
    running, began, ended = [], {}, {}
    for now, step in enumerate([*forward, *[None] * len(forward)]):
        if step is not None:
            running.append(recorder.enter(step[0], node=now, with_graph=step[1]))
            began[running[-1]] = now
        elif len(running) > 1 or (running and now >= len(forward)):
            ended[running[-1]] = now
            recorder.exit(running.pop())
    return Recorded(recorder.current, began, ended)


def advance(this, first):
    """Execute the events down to index ``first``, as the lifecycle does."""
    executed = []
    while (event := this.next_event()) is not None and event[2] >= first:
        this.begin -= event[0] is Event.BEGIN
        this.over -= event[0] is Event.OVER
        executed.append(event)
    return executed


def program(this):
    this.rewind()
    return advance(this, 0)


# --- the order of the program -----------------------------------------------------------


@given(forwards)
def test_each_call_begins_once_and_the_last_to_end_is_the_first(forward):
    this, _, ended = record(forward)
    begun = [call for event, call, _ in program(this) if event is Event.BEGIN]
    assert begun == sorted(ended, key=ended.get, reverse=True)
    assert [call.exit for call in begun] == list(reversed(range(len(ended))))


@given(forwards)
def test_each_unit_is_over_once_and_the_last_to_begin_is_the_first(forward):
    this, began, _ = record(forward)
    over = [call for event, call, _ in program(this) if event is Event.OVER]
    firsts = {call.unit: call for call in sorted(began, key=began.get, reverse=True)}.values()
    assert over == sorted(firsts, key=began.get, reverse=True)


@given(forwards)
def test_a_unit_is_over_once_all_calls_that_ended_after_it_began_have_begun(forward):
    """These are its own calls, those inside, those around, and all that came later. No others."""
    this, began, ended = record(forward)
    order = [(event, call) for event, call, _ in program(this)]
    for first in this.firsts:
        before = order[: order.index((Event.OVER, first))]
        begun = {call for event, call in before if event is Event.BEGIN}
        assert begun == {call for call in ended if ended[call] > began[first]}


# --- the cursor -------------------------------------------------------------------------


@given(forwards, st.lists(st.integers(0, 12)))
def test_steps_of_any_size_execute_what_one_step_does(forward, steps):
    this = record(forward).this
    at_once = program(this)
    this.rewind()
    executed = []
    for number, first in enumerate([*steps, 0], 1):
        before = this.begin, this.over
        executed += advance(this, first)
        assert this.begin <= before[0] and this.over <= before[1]
        lowest = min([*steps, 0][:number])
        assert executed == [event for event in at_once if event[2] >= lowest]
    assert this.next_event() is None
    assert program(this) == at_once  # a later backward through the same graph


def collectives(this, used):
    """Return what a rank executes whose loss depends on the outputs of the calls ``used``."""
    this.rewind()
    executed = []
    for call in sorted(used, key=lambda call: -call.exit):  # an output has got its gradient
        executed += advance(this, call.exit + 1)
        this.begin = min(this.begin, call.exit)
        executed.append((Event.BEGIN, call, call.exit))
    executed += advance(this, 0)
    return [(event, call) for event, call, _ in executed if event is Event.OVER or call.has_graph]


@given(forwards, st.data())
def test_ranks_that_skip_different_calls_issue_the_same_collectives(forward, data):
    this = record(forward).this
    skippable = [call for call in this.exits if call.has_graph]
    some = st.lists(st.sampled_from(skippable), unique=True) if skippable else st.just([])
    assert collectives(this, data.draw(some)) == collectives(this, data.draw(some))


def first_after(this, node, backward):
    after = (call for call in this.exits if call.began_at > node)
    counted = (call.opens for call in after if call.has_graph or call.reached_in == backward)
    return min(counted, default=sys.maxsize)


@given(forwards, st.sets(st.integers(0, 12)))
def test_a_node_comes_after_the_backward_of_all_calls_that_began_after_it(forward, reached):
    this, _, ended = record(forward)
    for call in this.exits:
        call.reached_in = 7 if call.exit in reached else -1
    this.rewind()
    for first in range(len(this.exits), -1, -1):
        advance(this, first)
        for node in range(2 * len(forward)):
            around = (call for call in ended if call.began_at <= node < ended[call])
            if all(call.exit >= this.begin for call in around):  # their backwards have begun
                assert this.first_after(node, 7) == first_after(this, node, 7)


def test_a_node_inside_a_call_that_was_not_reached_comes_after_calls_inside_it_too():
    this = record([(0, True), None, (1, True)]).this
    assert [call.unit for call in this.exits] == [1, 0]
    this.rewind()
    node = this.exits[0].began_at - 1  # made inside unit 0, before unit 1 began
    assert this.first_after(node, 7) == first_after(this, node, 7) == 0


# --- open passes ------------------------------------------------------------------------


class OpenPasses:
    """The open passes of each unit, as sets: what ``Recorder`` keeps as two numbers."""

    def __init__(self):
        self.recorder = Recorder()
        self.passes = []  # whose backward has not come
        self.open = {unit: set() for unit in UNITS}

    def forward(self, forward):
        this = record(forward, self.recorder).this
        self.passes.append(this)
        for unit, with_graph in filter(None, forward):
            self.open[unit] |= {this.number} if with_graph else set()

    def backward(self, position):
        this = self.passes[position]
        program(this)
        for unit, numbers in self.open.items():
            assert self.recorder.is_open(unit) == bool(numbers)
            assert self.recorder.is_open(unit, but=this) == bool(numbers - {this.number})
            assert self.recorder.is_open_before(unit, this) == any(n < this.number for n in numbers)
            numbers.discard(this.number)
        self.recorder.close([self.passes.pop(position)])


ORDERS = {"oldest first": [0], "newest first": [-1], "any of two": [0, -1]}


@pytest.mark.parametrize("order", ORDERS)
@given(steps=st.lists(forwards | st.integers(0, 1)))
def test_units_of_open_passes_are_known(order, steps):
    opens = OpenPasses()
    for step in steps:
        is_full = order == "any of two" and len(opens.passes) == 2
        if isinstance(step, list) and not is_full:
            opens.forward(step)
        elif isinstance(step, int) and opens.passes:
            opens.backward(ORDERS[order][step % len(ORDERS[order])])


def test_a_pass_in_the_middle_is_open_when_those_around_it_are_not():
    opens = OpenPasses()
    for _ in range(3):
        opens.forward([(0, True)])
    opens.backward(0)
    opens.backward(1)  # the third pass, while the second is open


@given(forwards, st.integers(0, 12))
def test_a_backward_closes_the_units_that_are_over(forward, first):
    recorder = Recorder()
    this = record(forward, recorder).this
    this.rewind()
    over = {call.unit for event, call, _ in advance(this, first) if event is Event.OVER}
    recorder.close([this])
    with_graph = {unit for unit, has_graph in filter(None, forward) if has_graph}
    assert {unit for unit in UNITS if recorder.is_open(unit)} == with_graph - over


@pytest.mark.parametrize("end", ["an optimizer step", "close_all", "forget"])
def test_nothing_is_open_after(end):
    recorder = Recorder()
    record([(0, True)], recorder)
    assert recorder.is_open(0) and not recorder.begin(0) and recorder.is_open(0)
    recorder.begin(1) if end == "an optimizer step" else getattr(recorder, end)()
    assert not recorder.is_open(0)


# --- prediction -------------------------------------------------------------------------


def expected(history, began):
    """Return what followed the unit that began last, in the last pass like this one that had it."""
    *_, unit = began
    for order in reversed(history):
        places = [place for place, each in enumerate(order) if each == unit]
        if order[0] == began[0] and len(places) >= began.count(unit):
            return [*order, None][places[began.count(unit) - 1] + 1]
    return None


orders = st.lists(st.sampled_from(UNITS), min_size=1, max_size=6)


@given(st.lists(st.tuples(orders, st.booleans()), max_size=6))
@example([([0, 1], False), ([0, 2], True), ([0, 1], False)])
@example([([0, 1], False), ([0], False), ([0], False)])
def test_the_order_of_the_last_complete_pass_is_expected_again(passes):
    recorder, history = Recorder(), []
    assert recorder.next_in_forward() is None
    for order, is_interrupted in passes:
        recorder.begin(0)
        for count, unit in enumerate(order, 1):
            recorder.enter(unit, node=0, with_graph=True)
            assert recorder.next_in_forward() == expected(history, order[:count])
        if is_interrupted:
            recorder.forget()
        else:
            history.append(order)
