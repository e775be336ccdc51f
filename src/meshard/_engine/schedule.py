"""Recorded and predicted order of units.

Two orders. Entries recorded in a forward predict the next forward; exits of this forward,
reversed, are the order of its backward. (With one list for both, the last prefetch of a backward
gathers a unit for the next forward before the optimizer has stepped it.)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """What the outermost unit is doing."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass(slots=True)
class ForwardCall:
    """One run of one unit's forward."""

    unit: int
    entered: int  # ticks of the pass
    is_first: bool = True  # of its unit in this pass: the last that a backward comes to
    exited: int = -1
    exit_position: int = -1  # place in ForwardPass.exits
    begun_in: int = -1  # number of the last backward that has come to it
    began_at: int = -1  # the next autograd node then, if it may leave tensors in its arguments


@dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward of the outermost unit, with all that ran inside."""

    entries: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    first_entries: list[tuple[int, int]] = field(default_factory=list)  # unit, ticks
    units: set[int] = field(default_factory=set)
    last_call: dict[int, ForwardCall] = field(default_factory=dict)
    ticks: int = 0
    swept: int = 0  # how many of first_entries have not been found to be over
    swept_in: int = -1  # the backward that is about


class StepSchedule:
    """Records the order of units, and predicts it. Units are known by number."""

    def __init__(self) -> None:
        self._previous: list[int] = []
        self._position = -1  # of the last entry, in the previous pass
        self._passes: list[ForwardPass] = []  # whose backward may come, oldest first
        self.current = ForwardPass()
        self.in_backward: ForwardPass | None = None  # the last whose backward has come to a unit
        self.newest: ForwardCall | None = None  # the last that has begun

    def begin_forward(self, *, with_graph: bool = True) -> None:
        """Start recording a pass; the one before becomes the prediction."""
        if self.current.entries:
            self._previous = self.current.entries
        self.current = ForwardPass()
        self._position = -1
        if with_graph:
            self._passes.append(self.current)

    def end_backward(self) -> None:
        """No pass has a backward to come: what a new one differentiates is run anew."""
        self._passes.clear()
        self.in_backward = None

    def forget(self) -> None:
        """Drop what an interrupted pass recorded, and keep the prediction."""
        self.end_backward()
        self.current = ForwardPass()
        self._position = -1

    @property
    def present(self) -> ForwardPass:
        """The pass that runs. What is recomputed belongs to one that need not be the last."""
        return self.current if self.in_backward is None else self.in_backward

    def enter(self, unit: int) -> ForwardCall:
        """Record that a unit's forward begins."""
        now = self.current
        is_first = unit not in now.units
        call = self.newest = ForwardCall(unit, now.ticks, is_first)
        if is_first:
            now.units.add(unit)
            now.first_entries.append((unit, now.ticks))
        now.entries.append(unit)
        now.ticks += 1
        self._follow(unit)
        return call

    def _follow(self, unit: int) -> None:
        expected = self._position + 1
        if expected < len(self._previous) and self._previous[expected] == unit:
            self._position = expected
        elif unit in self._previous:
            # Off the recorded way: take it up again after this unit, later if possible.
            after = [i for i, other in enumerate(self._previous) if other == unit]
            self._position = next((i for i in after if i > self._position), after[0])

    def exit(self, call: ForwardCall) -> None:
        """Record that a unit's forward has ended."""
        now = self.current
        call.exited = now.ticks
        call.exit_position = len(now.exits)
        now.exits.append(call.unit)
        now.last_call[call.unit] = call
        now.ticks += 1

    def next_in_forward(self) -> int | None:
        """Return the unit expected to enter after the last one that did."""
        following = self._position + 1
        if self._position < 0 or following >= len(self._previous):
            return None
        return self._previous[following]

    @staticmethod
    def next_in_backward(of: ForwardPass, call: ForwardCall) -> int | None:
        """Return the unit whose backward follows that of ``call``."""
        return of.exits[call.exit_position - 1] if call.exit_position > 0 else None

    @staticmethod
    def over_before(of: ForwardPass, call: ForwardCall, backward: int) -> list[int]:
        """Return the units whose backward is over once that of ``call`` begins, last first.

        Autograd runs nodes that were made later first. So when the backward of one call begins,
        every unit that was entered only after that call had ended has nothing left to run,
        whether or not any of its outputs was used.

        Args:
            of: The pass of the call.
            call: The call whose backward begins.
            backward: Number of the backward; each unit is returned once in each.
        """
        call.begun_in = backward
        if of.swept_in != backward:
            of.swept_in, of.swept = backward, len(of.first_entries)
        over = []
        while of.swept and of.first_entries[of.swept - 1][1] > call.exited:
            of.swept -= 1
            over.append(of.first_entries[of.swept][0])
        return over

    def runs_before(self, of: ForwardPass | None, unit: int) -> bool:
        """Return whether ``unit`` also ran in a pass before ``of`` whose backward may come.

        Its backward is still to come there. A rank that used the unit only in the later pass has
        all gradients early, another has not; all wait, and reduce at the same place.

        Args:
            of: The pass whose backward runs; None: the last one.
            unit: The unit.
        """
        if len(self._passes) < 2:
            return False
        until = self._passes[-1] if of is None else of
        for each in self._passes:
            if each is until:
                return False
            if unit in each.units:
                return True
        return False
