"""Gathers ahead of use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from meshard._engine.param_group import ParamState
from meshard._engine.schedule import ForwardCall, ForwardPass, StepSchedule
from meshard._engine.unit import Unit


class Ahead(NamedTuple):
    """Units to gather next."""

    units: list[Unit]
    in_forward: bool  # where edits of the shards may have made a whole copy stale


def _is_passing(unit: Unit, ahead: Ahead) -> bool:
    """Whether a unit is gathered for a backward after which it is given back."""
    return not ahead.in_forward and unit.settings.reshard_after_backward


class Prefetcher:
    """Gathers a unit together with those that come next.

    Args:
        units: The units of a root, by the numbers that the schedule uses.
    """

    def __init__(self, units: Sequence[weakref.ref[Unit]]) -> None:
        self._units = units
        self._prefetched: list[Unit] = []

    def _unit(self, number: int | None) -> Unit | None:
        return None if number is None else self._units[number]()

    def after_entry(self, unit: Unit, schedule: StepSchedule) -> Ahead:
        """Return what follows a unit whose forward begins."""
        chosen = unit.settings.forward_prefetch
        if chosen:
            return Ahead([other for ref in chosen if (other := ref()) is not None], True)
        following = self._unit(schedule.next_in_forward())
        return Ahead([] if following is None else [following], True)

    def after_backward_of(self, unit: Unit, of: ForwardPass, call: ForwardCall) -> Ahead:
        """Return what follows a unit whose backward begins."""
        chosen = unit.settings.backward_prefetch
        if chosen:
            return Ahead([other for ref in chosen if (other := ref()) is not None], False)
        following = self._unit(StepSchedule.next_in_backward(of, call))
        if following is None or not following.settings.unshard_in_backward:
            return Ahead([], False)
        return Ahead([following], False)

    def unshard(self, unit: Unit, ahead: Ahead, *, keep: bool) -> None:
        """Have a unit whole, and start gathering what comes next.

        Args:
            unit: The unit that is about to compute.
            ahead: What comes next.
            keep: Keep this rank's part for a gather among neighbours, if the unit asks for it.
        """
        assert unit.group is not None
        is_cold = unit.group.state is ParamState.SHARDED
        if is_cold:
            unit.group.start_unshard(only_for_backward=_is_passing(unit, ahead))
            # Nothing to hide this gather behind: let the next one share the wait.
            self._start(ahead)
        unit.group.finish_unshard(unit.settings.post_forward_group if keep else None)
        if not is_cold:
            self._start(ahead)

    def _start(self, ahead: Ahead) -> None:
        for unit in ahead.units:
            group = unit.group
            if group is not None and group.state is ParamState.SHARDED:
                if ahead.in_forward:
                    group.forget_stale(leftover=False)
                group.start_unshard(only_for_backward=_is_passing(unit, ahead))
                group.is_leftover = False  # of what was whole before
                self._prefetched.append(unit)
            if unit.siblings:  # they are entered at the same moment
                self._start(Ahead(unit.siblings, ahead.in_forward))

    def drop_unused(self) -> None:
        """Give back what was predicted, but not used."""
        for unit in self._prefetched:
            if unit.group is not None and unit.group.state is ParamState.GATHERING:
                unit.group.reshard()
        self._prefetched.clear()

    def forget(self) -> None:
        """A step was interrupted: somebody else gives back what is whole."""
        self._prefetched.clear()
