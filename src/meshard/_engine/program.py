"""The order of units in a forward, and the program that the backward of a forward executes.

A unit is given by its number (``Unit.number``). A *pass* is one forward of a root, or of a part
that the user called by itself. It records its calls in two lists, which are equal on all ranks that
run the same units: ``exits``, the calls in the order in which they end; and ``firsts``, the first
call of each unit, in the order in which they begin. The backward of the pass executes these events,
by descending index:

    BEGIN(call)   index: call.exit     gather the unit, and start the next gather
    OVER(call)    index: call.opens    reshard the unit of this first call, and reduce it

``opens`` is ``len(exits)`` when the call began. An OVER comes before a BEGIN if its index is
larger, and after it if they are equal. So a unit is over after the backward of all its calls and of
all calls inside has begun, and after every unit that began later is over.

Whatever autograd tells the engine, a hook on an output or a node that runs a forward again, means
*advance to an index*: every event at or above the index is executed, whether this rank uses the
unit or not. That is why all ranks issue the same collectives in the same order.
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
    began_at: int  # ``next_node()`` when it began: autograd nodes made before have lower numbers
    opens: int  # len(Pass.exits) when it began
    has_graph: bool  # a backward of it may come
    exit: int = -1  # index in Pass.exits; -1: it has not ended
    reached_in: int = -1  # number of the last backward that reached it


class Event(enum.Enum):
    """What happens to a unit in the backward of a pass."""

    BEGIN = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class Pass:
    """One forward with all units inside, and how far the present backward has come in it."""

    number: int  # passes are numbered as they begin
    exits: list[Call] = field(default_factory=list)
    firsts: list[Call] = field(default_factory=list)
    begun: list[Call] = field(default_factory=list)  # all calls, as they begin
    calls: dict[int, list[Call]] = field(default_factory=dict)  # of each unit, as they begin
    is_watched: bool = False  # an output has a hook, which tells when a backward reaches the pass
    # The cursor, which a backward sets to the end of the lists as it reaches the pass (``rewind``).
    # Since then ``exits[begin:]`` have begun and ``firsts[over:]`` are over.
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
        """Return the index from which on calls began after autograd's ``node`` was made.

        If there are none, it is above all indices. The backward of these calls is over when
        ``node`` runs in backward number ``backward``. A call without a graph may be inside a
        reentrant checkpoint, which runs it again. It counts only once this backward has reached it:
        before, ``node`` may be that of the checkpoint itself.
        """
        start = bisect.bisect_right(self.begun, node, key=attrgetter("began_at"))
        for call in itertools.islice(self.begun, start, None):
            if call.has_graph or call.reached_in == backward:
                return call.opens  # what begins later has not ended by then
        return sys.maxsize

    def next_in_backward(self, call: Call) -> int | None:
        """Return the unit whose backward is expected to begin next; None if none is expected."""
        before = (self.exits[index] for index in range(call.exit - 1, -1, -1))
        return next((each.unit for each in before if each.has_graph), None)


_Entry = tuple[int, int, int]
# Forwards with grad that are followed by neither a backward nor a step would pile up.
_MAX_OPEN = 2**16


class Recorder:
    """Records the passes of one root, and predicts which unit comes next in a forward.

    The order of a forward is predicted from the last one that began with the same unit. Backwards
    need no prediction: their order is that of the program.
    """

    def __init__(self) -> None:
        self.current = Pass(0)
        # Key: the first unit of a pass (users may call a part of a model by itself), a unit, and
        # how many calls of it came before in the pass. Value: the unit that began next the last
        # time; None if none did.
        self._following: dict[_Entry, int | None] = {}
        # The numbers of the passes with a unit whose backward has not come, oldest first.
        self._open: dict[int, dict[int, None]] = {}
        self._num_steps = 0

    def begin(self, num_steps: int) -> bool:
        """Begin a pass. Return whether optimizers, which have taken ``num_steps``, have stepped.

        A forward whose backward has not come before a step counts as one that has none.
        """
        # Learn the order of the last pass now, and not in it: an interrupted pass is forgotten,
        # because ranks may differ in how far they came.
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
        """Record that a unit begins. ``node`` is the number of the next autograd node."""
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
        """Return the unit that is expected to enter next; None if no unit is expected."""
        begun = self.current.begun
        if not begun:
            return None
        unit = begun[-1].unit
        return self._following.get((begun[0].unit, unit, len(self.current.calls[unit]) - 1))

    def is_open(self, unit: int, but: Pass | None = None) -> bool:
        """Whether the backward of a pass with ``unit``, other than ``but``, has not come."""
        numbers = self._open.get(unit, {})
        return bool(numbers) and (but is None or len(numbers) > 1 or but.number not in numbers)

    def is_open_before(self, unit: int, this: Pass) -> bool:
        """Whether ``unit`` ran in an earlier pass than ``this``, whose backward may come later."""
        return next(iter(self._open.get(unit, ())), this.number) < this.number

    def close(self, passes: list[Pass]) -> None:
        """Record that a backward has freed the graphs of the units of ``passes`` that are over.

        A unit whose forward has called this backward, and goes on, has its own backward later.
        """
        for each in passes:
            for call in each.firsts[each.over :]:
                if call.exit >= 0:
                    self._open.get(call.unit, {}).pop(each.number, None)

    def close_all(self) -> None:
        """Record that no backward of an earlier pass will come."""
        self._open.clear()

    def forget(self) -> None:
        """Drop the last pass, and expect no backward of earlier ones.

        Its order is not learned, even if it is complete: on other ranks it may be cut off.
        """
        self.current = Pass(self.current.number)
        self.close_all()
