"""Recorded and predicted order of units. A unit is given by its number (``Unit.number``).

There are two orders. In forward, each unit is expected to be followed by the same unit as the last
time. In backward, units come in the reverse of the order in which their forwards ended. The two
orders are recorded apart. If one record served both, a backward would end with a prefetch for the
next forward, of a unit that the optimizer has not stepped yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class _Entry(NamedTuple):
    """The beginning of one forward of a unit.

    In two passes that began with the same unit, the n-th entries of a unit are equal.
    """

    began_with: int  # the first unit of the pass
    unit: int
    num_before: int  # entries of the same unit before this one in the pass


@dataclass(slots=True)
class ForwardCall:
    """One run of one unit's forward."""

    unit: int
    is_first: bool = True  # the first call of its unit in this pass; its backward comes last
    has_graph: bool = True  # it ran with grad enabled
    # len(ForwardPass.exits) when the call began. The next call to end gets this index: the first to
    # end inside this call, or this call itself.
    first_inside: int = 0
    exit_position: int = -1  # index in ForwardPass.exits; -1: it has not ended
    reached_in: int = -1  # number of the last backward that reached it
    began_at: int = -1  # ``next_node()`` when it began: nodes made before have lower numbers
    may_collect: bool = False  # it may store tensors in an argument, such as a list
    is_read: bool = False  # the unit was not called: a reader has read it (``unshard_on_access``)
    is_watched: bool = False  # one of its outputs has a hook that tells when its backward begins


@dataclass(eq=False)  # no slots: there are weak references to it
class ForwardPass:
    """One forward of a root, or of a part that the user called by itself, with all units inside."""

    exits: list[ForwardCall] = field(default_factory=list)
    first_entries: list[ForwardCall] = field(default_factory=list)
    units: dict[int, int] = field(default_factory=dict)  # unit -> how often it was entered
    entries: list[_Entry] = field(default_factory=list)
    last_call: dict[int, ForwardCall] = field(default_factory=dict)
    # The units of earlier passes whose backward may still come. This is valid while ``epoch`` is
    # equal to ``StepSchedule._epoch``.
    earlier: frozenset[int] = frozenset()
    epoch: int = -1
    # ``num_open`` and ``num_to_begin`` say how far backward number ``open_in`` has come in this
    # pass. In any other backward they mean nothing. The units of ``first_entries[num_open:]`` are
    # over. The calls ``exits[num_to_begin:]`` have begun their backward, or autograd has left them
    # out, or they ran without grad (a reentrant checkpoint may run these again). A call with a
    # lower index may have begun its backward too: ``ForwardCall.reached_in`` tells.
    num_open: int = 0
    num_due: int = 0  # units of ``first_entries[num_due:]`` have had their turn to be reduced
    num_to_begin: int = 0
    open_in: int = -1
    is_spent: bool = False  # a backward has freed its graph

    def open(self, backward: int) -> None:
        """Begin the backward of this pass, in backward number ``backward``, unless it has begun."""
        if self.open_in != backward:
            self.open_in = backward
            self.num_open = self.num_due = len(self.first_entries)
            self.num_to_begin = len(self.exits)

    def next_event(self) -> tuple[bool, ForwardCall] | None:
        """Return the next event: (True, call) the backward of a call begins; (False, first call)
        a unit is over: what it first ran in began after the call that begins next had ended."""
        over = self.first_entries[self.num_open - 1] if self.num_open else None
        if not self.num_to_begin:
            return None if over is None else (False, over)
        begins = self.exits[self.num_to_begin - 1]
        if over is not None and over.first_inside > begins.exit_position:
            return False, over
        return True, begins

    def next_due(self) -> ForwardCall | None:
        """Return the first call of the unit that is to be reduced next, if all inside has begun."""
        first = self.first_entries[self.num_due - 1] if self.num_due else None
        return None if first is None or self.num_to_begin > first.first_inside else first

    def first_after(self, node: int) -> int:
        """Return the index in ``exits`` from which on calls with a graph began after ``node``."""
        after = (
            call.exit_position
            for call in self.exits
            if call.began_at > node and (call.has_graph or call.reached_in == self.open_in)
        )
        return min(after, default=len(self.exits))

    def next_in_backward(self, call: ForwardCall) -> int | None:
        return self.exits[call.exit_position - 1].unit if call.exit_position > 0 else None

class StepSchedule:
    """The order of units in the steps of one root. Units are given by number."""

    def __init__(self) -> None:
        # Key: an entry. Value: the unit that entered after it, when this was last recorded; None if
        # the entry was the last of its pass.
        self._successors: dict[_Entry, int | None] = {}
        self._last: ForwardPass | None = None  # the last pass with grad since ``end_passes``
        self._epoch = 0  # counts how often passes were forgotten
        self.current = ForwardPass()

    def begin_forward(self, *, with_graph: bool = True) -> None:
        # Learn the order from the last pass. That pass has ended: ``forget`` drops a pass that is
        # interrupted, because ranks may differ in how far they came in it.
        entries = self.current.entries
        following = [*(each.unit for each in entries[1:]), None]
        self._successors.update(zip(entries, following, strict=False))
        self.current = ForwardPass()
        if with_graph:
            # Keep only the units of earlier passes. References to the passes themselves would pile
            # up if forwards with grad never get a backward.
            if self._last is not None:
                self.current.earlier = self._last.earlier.union(self._last.units)
            self.current.epoch = self._epoch
            self._last = self.current

    def end_passes(self) -> None:
        """Forget all passes: from now on no reduction waits for the backward of one of them."""
        self._last = None
        self._epoch += 1

    def forget(self) -> None:
        """Drop what an interrupted pass has recorded. The predicted order stays."""
        self.end_passes()
        self.current = ForwardPass()

    def enter(self, unit: int, *, node: int, with_graph: bool = True) -> ForwardCall:
        """Record that a unit begins. ``node`` is the number of the next autograd node."""
        now = self.current
        num_before = now.units.get(unit, 0)
        call = ForwardCall(unit, not num_before, with_graph, began_at=node)
        call.first_inside = len(now.exits)
        if not num_before:
            now.first_entries.append(call)
        now.units[unit] = num_before + 1
        # Users may call a part of a model by itself. A unit may then have another successor than in
        # a forward of the whole model. So an entry includes the unit that began the pass.
        now.entries.append(_Entry(now.first_entries[0].unit, unit, num_before))
        return call

    def exit(self, call: ForwardCall) -> None:
        now = self.current
        call.exit_position = len(now.exits)
        now.exits.append(call)
        now.last_call[call.unit] = call

    def next_in_forward(self) -> int | None:
        """Return the unit that is expected to enter next; None if no unit is expected."""
        entries = self.current.entries
        return self._successors.get(entries[-1]) if entries else None

    def runs_before(self, forward_pass: ForwardPass | None, unit: int) -> bool:
        """Return whether ``unit`` ran before ``forward_pass``, in a pass that is not forgotten.

        ``forward_pass`` None: the last pass. If the result is True, the unit must not be reduced
        before the backward of the earlier pass. A rank that used the unit's parameters only in the
        later pass has all gradients before that backward, but all ranks must reduce at the same
        moment.
        """
        forward_pass = forward_pass or self._last
        return (
            forward_pass is not None
            and unit in forward_pass.earlier
            and forward_pass.epoch == self._epoch
        )
