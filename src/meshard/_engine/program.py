"""The record of a forward, and the program that its backward executes.

A unit is identified by its number (``Unit.number``). A *pass* is one forward of a root, or of a
part that the user called directly. It records two lists: ``exits`` has all calls in the order in
which they end, and ``firsts`` has the first call of each unit in the order in which they begin.
Ranks that run the same units record equal lists. The backward of the pass executes two kinds of
events, by descending index:

    BEGIN(call)   index: call.exit     gather the unit, and start the next gather
    OVER(call)    index: call.opens    reshard the unit of this first call, then reduce it

``opens`` is ``len(exits)`` when the call began. If a BEGIN and an OVER have the same index, the
BEGIN comes first. So the OVER of a unit comes after the BEGIN of all its calls and of all calls
inside them, and after the OVER of every unit that began later.

Hooks on outputs fire, checkpoint nodes run a forward again, the backward ends: each of these means
*advance to an index*. The engine then executes every event at or above the index, even for units
that this rank does not use. So all ranks issue the same collectives in the same order.
"""

from __future__ import annotations

import bisect
import collections
import enum
import itertools
import sys
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(slots=True, eq=False)
class Call:
    """One run of one unit's forward."""

    unit: int
    began_at: int  # ``next_node()`` when it began; older autograd nodes have lower numbers
    opens: int  # len(Pass.exits) when it began
    has_graph: bool  # grad was enabled, so a backward may come
    exit: int = -1  # index in Pass.exits; -1: it has not ended
    reached_in: int = -1  # number of the last backward that reached it


class Event(enum.Enum):
    """The kinds of events in the backward of a pass."""

    BEGIN = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class Pass:
    """The record of one forward, and the cursor of the present backward in its program."""

    number: int  # passes are numbered as they begin
    exits: list[Call] = field(default_factory=list)
    firsts: list[Call] = field(default_factory=list)
    begun: list[Call] = field(default_factory=list)  # all calls, in the order in which they begin
    calls: dict[int, list[Call]] = field(default_factory=dict)  # the same, per unit
    is_watched: bool = False  # an output has a hook that fires when a backward reaches it
    # The cursor. A backward that reaches the pass sets it to the end of both lists (``rewind``).
    # By now the BEGIN of ``exits[begin:]`` and the OVER of ``firsts[over:]`` are executed.
    begin: int = 0
    over: int = 0

    def rewind(self) -> None:
        """Set the cursor to the beginning of the program."""
        self.begin, self.over = len(self.exits), len(self.firsts)

    def next_event(self) -> tuple[Event, Call, int] | None:
        """Return the next event with its call and index; None at the end of the program."""
        call = self.exits[self.begin - 1] if self.begin else None
        first = self.firsts[self.over - 1] if self.over else None
        if first is not None and (call is None or first.opens > call.exit):
            return Event.OVER, first, first.opens
        return None if call is None else (Event.BEGIN, call, call.exit)

    def first_after(self, node: int, backward: int) -> int:
        """Return the index to advance to when autograd runs ``node`` in backward ``backward``.

        Autograd runs newer nodes first. So the backward of every call that began after ``node`` was
        made is over, and the index is ``opens`` of the first such call. It is above all indices if
        there is none. A call without a graph counts only if ``backward`` has reached it. Otherwise
        ``node`` may be the reentrant checkpoint around the call, and is about to run it again.
        """
        start = bisect.bisect_right(self.begun, node, key=attrgetter("began_at"))
        for call in itertools.islice(self.begun, start, None):
            if call.has_graph or call.reached_in == backward:
                return call.opens  # later calls also end at or above this index
        return sys.maxsize

    def next_in_backward(self, call: Call) -> int | None:
        """Return the unit whose backward is expected to begin next; None if none is expected."""
        before = (self.exits[index] for index in range(call.exit - 1, -1, -1))
        return next((each.unit for each in before if each.has_graph), None)


_Entry = tuple[int, int, int]
# The most open passes to remember per unit. Forwards with grad may pile up without a backward.
_MAX_OPEN = 2**16


class Recorder:
    """The passes of one root, and a prediction of which unit comes next in a forward.

    A forward is expected to repeat the order of the last forward that began with the same unit.
    A backward needs no prediction: its program gives the order.
    """

    def __init__(self) -> None:
        self.current = Pass(0)
        # Key: the first unit of a pass (users may call a part of a model directly), a unit, and how
        # often it had run before in the pass. Value: the unit that began next; None if none did.
        self._following: dict[_Entry, int | None] = {}
        # Per unit: the numbers of its open passes (a backward may still come), oldest first.
        self._open: dict[int, dict[int, None]] = {}
        self._num_steps = 0

    def begin(self, num_steps: int) -> bool:
        """Begin a pass. Return whether an optimizer has stepped since the last pass began.

        ``num_steps`` is the number of all steps so far. A step closes all open passes.
        """
        # Learn the order of the last pass only now. If it was interrupted, ``forget`` has dropped
        # it, because ranks may have come to different points.
        begun, counts = self.current.begun, collections.Counter[int]()
        for call, after in itertools.zip_longest(begun, begun[1:]):
            entry = begun[0].unit, call.unit, counts[call.unit]
            self._following[entry] = None if after is None else after.unit
            counts[call.unit] += 1
        self.current = Pass(self.current.number + 1)
        has_stepped = num_steps != self._num_steps
        if has_stepped:
            self._num_steps = num_steps
            self._open.clear()
        return has_stepped

    def enter(self, unit: int, *, node: int, with_graph: bool) -> Call:
        """Record that a call of ``unit`` begins. ``node``: the number of the next autograd node."""
        now = self.current
        call = Call(unit, node, len(now.exits), with_graph)
        calls = now.calls.setdefault(unit, [])
        if not calls:
            now.firsts.append(call)
        calls.append(call)
        now.begun.append(call)
        if with_graph:
            numbers = self._open.setdefault(unit, {})
            numbers[now.number] = None
            if len(numbers) > _MAX_OPEN:
                del numbers[next(iter(numbers))]
        return call

    def exit(self, call: Call) -> None:
        call.exit = len(self.current.exits)
        self.current.exits.append(call)

    def next_in_forward(self) -> int | None:
        """Return the unit that is expected to run next; None if no unit is expected."""
        begun = self.current.begun
        if not begun:
            return None
        unit = begun[-1].unit
        return self._following.get((begun[0].unit, unit, len(self.current.calls[unit]) - 1))

    def is_open(self, unit: int, but: Pass | None = None) -> bool:
        """Whether ``unit`` has an open pass, other than ``but``."""
        numbers = self._open.get(unit, {})
        return bool(numbers) and (but is None or len(numbers) > 1 or but.number not in numbers)

    def is_open_before(self, unit: int, this: Pass) -> bool:
        """Whether ``unit`` has an open pass that began before ``this``."""
        return next(iter(self._open.get(unit, ())), this.number) < this.number

    def close(self, passes: list[Pass]) -> None:
        """Close ``passes`` for the units that are over in them: no other backward will come.

        A unit whose forward still runs stays open. That forward has called the present backward,
        and the backward of the unit itself comes later.
        """
        for each in passes:
            for call in each.firsts[each.over :]:
                if call.exit >= 0:
                    self._open.get(call.unit, {}).pop(each.number, None)

    def close_all(self) -> None:
        """Close all open passes: no backward of an earlier pass will come."""
        self._open.clear()

    def forget(self) -> None:
        """Drop the last pass, and close all earlier ones.

        Its order is not learned even if it is complete, because other ranks may have been cut off.
        """
        self.current = Pass(self.current.number)
        self.close_all()
