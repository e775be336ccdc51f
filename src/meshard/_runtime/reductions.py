"""Which reductions are on their way, and when is each moved on?

On a device all stages are queued at once, and only the wait for the result is put off. Where a
wait blocks the host, each reduction moves on by one stage when a later one starts: the compute
between the two hides it. The order depends on the order of starts only, so it is the same on all
ranks.
"""

from __future__ import annotations

from collections import deque

from meshard._comm.communicator import Communicator
from meshard._runtime.gradient_state import ReductionInFlight
from meshard._runtime.unit import Unit


class Reductions:
    """The reductions of all units of a root, oldest first.

    Args:
        comm: What they travel by.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._in_flight: deque[tuple[Unit, ReductionInFlight]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether none is on its way."""
        return not self._in_flight

    def start(self, unit: Unit, *, over_replicas: bool) -> None:
        """Start reducing what a unit has accumulated, and move the others on.

        **Collective:** the unit's shard group, then its replica group if ``over_replicas``.
        """
        if unit.gradients is None:
            return
        self.finish_of(unit)  # what it holds is added to what comes now
        while len(self._in_flight) >= unit.settings.max_input_buffers:
            self._finish_oldest()
        started = unit.gradients.start_reduce(
            over_replicas=over_replicas,
            divide_factor=unit.settings.resolve_divide_factor(),
            zero_unused=unit.settings.zero_unused,
            before=[hook.before for hook in unit.settings.reduce_hooks],
            shard_group=unit.settings.scatter_group,
        )
        if started is None:
            return
        if not self._comm.waits_block_host:
            while started.reduction.has_more:
                started.reduction.advance()
        self._advance()
        self._in_flight.append((unit, started))

    def _advance(self) -> None:
        for _, each in self._in_flight:
            if each.reduction.has_more:
                each.reduction.advance()
        if self._comm.waits_block_host:
            while self._in_flight and not self._in_flight[0][1].reduction.has_more:
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        unit, each = self._in_flight.popleft()
        assert unit.gradients is not None
        after = [hook.after for hook in reversed(unit.settings.reduce_hooks)]
        unit.gradients.finish_reduce(each, after)
        if each.is_full:
            for subscriber in tuple(unit.on_reduced):
                subscriber(unit)

    def finish_of(self, unit: Unit) -> None:
        """Finish all up to the last one of ``unit``."""
        while any(other is unit for other, _ in self._in_flight):
            self._finish_oldest()

    def finish_partials_of(self, unit: Unit) -> None:
        """Finish all up to the last one of ``unit`` that stops before the replicas."""
        while any(other is unit and not each.is_full for other, each in self._in_flight):
            self._finish_oldest()

    def abandon(self) -> None:
        """Drop all of them. Waits for what was started, and starts nothing: ranks may differ."""
        while self._in_flight:
            unit, each = self._in_flight.popleft()
            each.reduction.abandon()
            if unit.gradients is not None:
                unit.gradients.abandoned()

    def finish_all(self) -> None:
        """Have every result in ``.grad``, or in its partial."""
        while self._in_flight:
            self._finish_oldest()
