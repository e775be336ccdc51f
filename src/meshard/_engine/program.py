"""The record of a forward, and the program that its backward executes.

A *pass* is one forward of a root, or of a part that the user called directly; a *call* is the
forward of one unit in it. A pass records two lists: ``exits`` has all calls in the order in which
they end, and ``firsts`` has the first call of each unit in the order in which they begin. Ranks
that run the same units record equal lists. The backward executes two kinds of events, by
descending index:

    BEGIN(call)   index: call.exit     gather the unit, and start the next gather
    OVER(call)    index: call.opens    reshard the unit of this first call, then reduce it

``exit`` is the index in ``exits``, and ``opens`` is ``len(exits)`` when the call began. At equal
indices BEGIN comes first. For a root R that runs A, then B: BEGIN R, BEGIN B, OVER B, BEGIN A,
OVER A, OVER R.

When a hook on an output fires, a checkpoint runs a forward again, or the backward ends, the engine
*advances to an index*: it executes all events at or above that index, even for units that this
rank's loss does not use. So all ranks issue the same collectives in the same order.
"""

from __future__ import annotations

import bisect
import collections
import enum
import itertools
import sys
import weakref
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


@dataclass(slots=True, eq=False)
class Call:
    """One run of one unit's forward."""

    unit: int  # ``Unit.number``
    began_at: int  # the number that autograd gives to the next node that is made in the call
    opens: int  # len(Pass.exits) when the call began
    has_graph: bool  # grad was enabled, so a backward may come
    exit: int = -1  # index in Pass.exits; -1: the forward has not ended
    reached_in: int = -1  # number of the last backward that went through this call


class Event(enum.Enum):
    """What a backward does to a unit: gather it (BEGIN), or reshard and reduce it (OVER)."""

    BEGIN = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class Pass:
    """The record of one forward, and which events the present backward has executed."""

    number: int  # the forwards of a root are numbered as they begin
    exits: list[Call] = field(default_factory=list)
    firsts: list[Call] = field(default_factory=list)
    begun: list[Call] = field(default_factory=list)  # all calls, in the order in which they begin
    calls: dict[int, list[Call]] = field(default_factory=dict)  # from Unit.number to its calls
    is_watched: bool = False  # an output has a hook that fires when a backward reaches it
    # In the present backward, the gathers for ``exits[begin:]`` and the reductions for
    # ``firsts[over:]`` are done. A backward works through both lists from their ends.
    begin: int = 0
    over: int = 0

    def rewind(self) -> None:
        """Begin a backward, in which no event is executed yet."""
        self.begin, self.over = len(self.exits), len(self.firsts)

    def next_event(self) -> tuple[Event, Call, int] | None:
        """Return the next event of the backward, with its call and index; None if all are done."""
        call = self.exits[self.begin - 1] if self.begin else None
        first = self.firsts[self.over - 1] if self.over else None
        if first is not None and (call is None or first.opens > call.exit):
            return Event.OVER, first, first.opens
        return None if call is None else (Event.BEGIN, call, call.exit)

    def first_after(self, node: int, backward: int) -> int:
        """Return the index to advance to when autograd runs ``node`` in backward ``backward``.

        Autograd runs newer nodes first. So the backward of every call that began after ``node`` was
        made is over. Return ``opens`` of the first such call, or a number above all indices. A call
        that ran under no_grad is skipped, unless this backward has reached it: ``node`` may be a
        reentrant checkpoint, which ran the call under no_grad and is about to run it again.
        """
        start = bisect.bisect_right(self.begun, node, key=attrgetter("began_at"))
        for call in itertools.islice(self.begun, start, None):
            if call.has_graph or call.reached_in == backward:
                return call.opens  # calls that began later have no lower ``opens``
        return sys.maxsize

    def next_in_backward(self, call: Call) -> int | None:
        """Return the number of the unit whose backward is expected after that of ``call``."""
        before = (self.exits[index] for index in range(call.exit - 1, -1, -1))
        return next((each.unit for each in before if each.has_graph), None)


_Entry = tuple[int, int, int]
# Per unit, the most forwards to remember as awaiting a backward, which users may never call.
_MAX_OPEN = 2**16


class Recorder:
    """Records the forwards of one root, and predicts which unit comes next in a forward.

    A forward is expected to repeat the order of the last forward that began with the same unit.
    A backward needs no such prediction: it reverses the order of its recorded forward.
    """

    def __init__(self) -> None:
        self.current = Pass(0)
        # Key: the first unit of a forward (users may call a part of a model directly), a unit, and
        # how many calls of it came before in that forward. Value: the unit that began next, if any.
        self._following: dict[_Entry, int | None] = {}
        # For each unit: the numbers of passes whose backward may still come, oldest first.
        self._open: dict[int, dict[int, None]] = {}
        self._num_steps = 0

    def begin(self, num_steps: int) -> bool:
        """Begin a pass. Return whether an optimizer has stepped since the last pass began.

        ``num_steps`` counts all optimizer steps. After one, no backward of older passes is awaited.
        """
        # Learn the order of units in the last pass only now. If that pass was interrupted, perhaps
        # at another unit on each rank, ``forget`` has dropped it, and nothing is learned from it.
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
        """Record that ``unit`` begins a forward. Autograd will number its next node ``node``."""
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
        """Return the number of the unit that is expected to run next; None if none is expected."""
        begun = self.current.begun
        if not begun:
            return None
        unit = begun[-1].unit
        return self._following.get((begun[0].unit, unit, len(self.current.calls[unit]) - 1))

    def is_open(self, unit: int, but: Pass | None = None) -> bool:
        """Whether a backward of ``unit`` may still come from a pass other than ``but``."""
        numbers = self._open.get(unit, {})
        return bool(numbers) and (but is None or len(numbers) > 1 or but.number not in numbers)

    def is_open_before(self, unit: int, this: Pass) -> bool:
        """Whether a backward of ``unit`` may still come from a pass that began before ``this``."""
        return next(iter(self._open.get(unit, ())), this.number) < this.number

    def close(self, passes: list[Pass]) -> None:
        """Expect no further backward through ``passes``, for the units that are over in them.

        A unit whose forward still runs is left out: that forward itself has called the present
        backward, and the unit's own backward comes later.
        """
        for each in passes:
            for call in each.firsts[each.over :]:
                if call.exit >= 0:
                    self._open.get(call.unit, {}).pop(each.number, None)

    def close_all(self) -> None:
        """Await no backward of any pass so far."""
        self._open.clear()

    def forget(self) -> None:
        """Drop the record of the last pass, and await no backward of any pass so far.

        The order in that pass is not learned, as other ranks may have cut it off at another unit.
        """
        self.current = Pass(self.current.number)
        self.close_all()


@dataclass(eq=False, slots=True)
class BackwardRun:
    """A backward that is running."""

    number: int  # backwards of a root are numbered as they begin
    graph_task: int = -1  # autograd's id of the graph task (engine run) that began it
    keeps_graph: bool = False  # retain_graph=True, which is the default with create_graph=True
    makes_graph: bool = False  # create_graph=True
    accumulates: bool = True  # the backward adds to .grad; that of torch.autograd.grad does not
    has_nested: bool = False  # a reentrant checkpoint has run a graph task inside this one
    reached: list[Pass] = field(default_factory=list)  # forwards it went through; now in the last


class ManualFinalization:
    """The mode in which the user's ``finalize_backward``, not the last backward, ends a step."""

    def __init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Reset: nothing is left to finalize."""
        self.is_due = False  # a backward has begun, and no finalize_backward has finished since
        # Whether a backward of this step kept its graph. If so, a pipeline schedule may still write
        # gradients of parameters into ``.grad`` without calling backward().
        self.is_split = False
        # The units whose last reductions ``finalize_backward`` has started. ``wait()`` of the
        # handle that it returns finishes them. None: there is nothing to wait for.
        self.started: list[weakref.ref[Any]] | None = None
