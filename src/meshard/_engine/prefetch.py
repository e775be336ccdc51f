"""Gathers ahead of use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from meshard._engine.param_group import ParamState
from meshard._engine.schedule import ForwardCall, ForwardPass, StepSchedule
from meshard._engine.unit import Unit


class UpNext(NamedTuple):
    """Units to gather next."""

    units: list[Unit]
    in_forward: bool  # where edits of the shards may have made an unsharded copy stale


def _is_only_for_backward(unit: Unit, up_next: UpNext) -> bool:
    """Whether a unit is gathered for a backward after which it is resharded."""
    return not up_next.in_forward and unit.settings.reshard_after_backward


class Prefetcher:
    """Gathers of units, ahead of their use.

    Args:
        units: The units of a root, by the numbers that the schedule uses.
    """

    def __init__(self, units: Sequence[weakref.ref[Unit]]) -> None:
        self._units = units
        self._prefetched: list[Unit] = []

    def _unit(self, number: int | None) -> Unit | None:
        return None if number is None else self._units[number]()

    def after_entry(self, unit: Unit, schedule: StepSchedule) -> UpNext:
        """Return what follows a unit whose forward begins."""
        chosen = unit.settings.forward_prefetch
        if chosen:
            return UpNext([other for ref in chosen if (other := ref()) is not None], True)
        following = self._unit(schedule.next_in_forward())
        return UpNext([] if following is None else [following], True)

    def after_backward_of(self, unit: Unit, of: ForwardPass, call: ForwardCall) -> UpNext:
        """Return what follows a unit whose backward begins."""
        chosen = unit.settings.backward_prefetch
        if chosen:
            return UpNext([other for ref in chosen if (other := ref()) is not None], False)
        following = self._unit(StepSchedule.next_in_backward(of, call))
        if following is None or not following.settings.unshard_in_backward:
            return UpNext([], False)
        return UpNext([following], False)

    def unshard(self, unit: Unit, up_next: UpNext, *, keep_shard: bool) -> None:
        """Unshard a unit, and start gathering what comes next.

        Args:
            unit: The unit that is about to compute.
            up_next: What comes next.
            keep_shard: Keep a post-forward shard, if the unit has a group for it.
        """
        assert unit.group is not None
        is_cold = unit.group.state is ParamState.SHARDED
        if is_cold:
            unit.group.start_unshard(only_for_backward=_is_only_for_backward(unit, up_next))
            # There is no compute to hide this gather behind: the next one shares the wait.
            self._start(up_next)
        unit.group.finish_unshard(unit.settings.post_forward_group if keep_shard else None)
        if not is_cold:
            self._start(up_next)

    def _start(self, up_next: UpNext) -> None:
        for unit in up_next.units:
            group = unit.group
            if group is not None and group.state is ParamState.SHARDED:
                if up_next.in_forward:
                    group.forget_stale()
                group.start_unshard(only_for_backward=_is_only_for_backward(unit, up_next))
                self._prefetched.append(unit)
            if unit.siblings:  # they are entered at the same moment
                self._start(UpNext(unit.siblings, up_next.in_forward))

    def drop_unused(self) -> None:
        """Reshard units that were gathered ahead and not used."""
        for unit in self._prefetched:
            if unit.group is not None and unit.group.state is ParamState.GATHERING:
                unit.group.reshard()
        self._prefetched.clear()

    def forget(self) -> None:
        """Forget what was gathered ahead: the step was interrupted, and all units are resharded."""
        self._prefetched.clear()
