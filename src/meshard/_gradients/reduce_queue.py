"""Reductions in flight.

On a device all stages are queued at once, and only the wait for the result is put off. Where a
wait blocks the host, each reduction moves on by one stage when a later one starts: the compute
between the two hides it. The order depends on the order of starts only, so it is the same on all
ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from meshard._comm.communicator import Communicator, InFlight, StepPhase
from meshard._comm.divergence import check_fingerprint, is_debugging
from meshard._engine.unit import ReduceHook, Unit
from meshard._gradients.accumulator import ReductionInFlight
from meshard._gradients.reduce_plan import ReduceOptions
from meshard._gradients.replicated_grads import ReplicatedGrads


class _Queued(NamedTuple):
    unit: Unit
    in_flight: ReductionInFlight
    hooks: tuple[ReduceHook, ...]  # of when it started: none may see half of a reduction
    ends_window: bool


class Reductions:
    """The reductions of all units of a root, oldest first.

    Args:
        comm: What they travel by.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_checked = is_debugging()
        self._queue: deque[_Queued] = deque()
        self._factors: dict[int, float | None] = {}
        self.has_sent_input = False  # what was sent may be given back before the next one starts
        self._leaving: InFlight | None = None  # the last copy of a gradient to the host
        self._backward = next(_backwards)

    @property
    def is_idle(self) -> bool:
        """Whether none is on its way."""
        return not self._queue

    def begin_forward(self) -> None:
        """Give back memory that only a backward needs."""
        self._comm.release_cached_memory(keep_for=StepPhase.FORWARD)

    def begin_backward(self) -> None:
        """Ask for divide factors anew: each is resolved once per backward, not once per unit."""
        self._factors.clear()
        self._backward = next(_backwards)
        self._comm.release_cached_memory(
            keep_for=StepPhase.BACKWARD
        )  # the peak of a step is there, as a rule

    def _divide_factor(self, unit: Unit) -> float | None:
        key = id(unit.settings.divide_factor)
        if key not in self._factors:
            self._factors[key] = unit.settings.resolve_divide_factor()
        return self._factors[key]

    def accumulate(self, unit: Unit) -> None:
        """Keep what has arrived whole, without a collective."""
        if unit.gradients is not None:
            hooks = unit.settings.reduce_hooks
            unit.gradients.accumulate([hook.arrived for hook in hooks if hook.arrived])

    def start(self, unit: Unit, *, over_replicas: bool, ends_window: bool) -> None:
        """Start reducing what a unit has accumulated, and move the others on.

        **Collective:** the unit's shard group, then its replica group if ``over_replicas``.

        Args:
            unit: Whose gradients.
            over_replicas: Also across the replicas.
            ends_window: Nothing of this window is to come after it.

        Raises:
            RuntimeError: The unit has been stepped in this backward already.
        """
        if unit.gradients is None:
            return
        if not over_replicas and isinstance(unit.gradients.sharded, ReplicatedGrads):
            # There is one shard, so nothing to send. Added up in the bucket, it takes no memory.
            self.accumulate(unit)
            return
        if unit.gradients.num_in_flight:
            self.finish_of(unit)  # what it holds is added to what comes now
        if unit.on_reduced and unit.reduced_in == self._backward:
            raise RuntimeError(_TOO_LATE.format(unit.label))
        while len(self._queue) >= unit.settings.max_input_buffers:
            self._finish_oldest()
        divide_factor = self._divide_factor(unit)
        if self._is_checked:
            _compare(unit, over_replicas, divide_factor)
        hooks = tuple(unit.settings.reduce_hooks)
        settings = unit.settings
        options = ReduceOptions(
            over_replicas=over_replicas,
            divide_factor=divide_factor,
            zero_unused=settings.zero_unused,
            shard_group=settings.scatter_group,
        )
        if hooks:
            options = options._replace(
                arrived=[hook.arrived for hook in hooks if hook.arrived],
                before=[hook.before for hook in hooks if hook.before],
                wire_dtype=next((hook.wire_dtype for hook in hooks if hook.wire_dtype), None),
            )
        if self._comm.waits_block_host:
            # Before this one takes memory, not after: they have had a unit's backward to hide
            # behind, and what they give back is what this one needs.
            self._advance()
        in_flight = unit.gradients.start_reduce(options)
        if in_flight is None:
            return
        self._queue.append(_Queued(unit, in_flight, hooks, ends_window))
        # Of a small unit it is not worth a look at every gradient.
        self.has_sent_input |= self._comm.waits_block_host and in_flight.layout.is_large
        if not self._comm.waits_block_host:
            while in_flight.reduction.has_more:
                in_flight.reduction.advance()

    def free_input_if_sent(self) -> None:
        """Give back early what has been sent: the next gradients need the memory."""
        for queued in self._queue:
            if not queued.in_flight.reduction.free_input_if_sent():
                return
        self.has_sent_input = False

    def _advance(self) -> None:
        """Move all by one stage, and finish those that were through all of theirs."""
        for queued in self._queue:
            if queued.in_flight.reduction.has_more:
                queued.in_flight.reduction.advance()
        while self._queue and not self._queue[0].in_flight.reduction.has_more:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        unit, in_flight, hooks, ends_window = self._queue.popleft()
        assert unit.gradients is not None
        after = [hook.after for hook in reversed(hooks) if hook.after] if hooks else ()
        is_offered = ends_window and len(unit.on_reduced) == 1
        leaving = unit.gradients.finish_reduce(in_flight, after, is_offered=is_offered)
        if self._leaving is not None:
            # Until compute has waited for it, a copy to the host keeps the device's memory.
            self._leaving.wait()
        self._leaving = leaving
        if ends_window and unit.on_reduced:
            self.signal(unit)

    def signal(self, unit: Unit) -> None:
        """Tell who subscribes that the gradient of a window is in ``.grad``: once per window."""
        if unit.reduced_in == self._backward:
            return
        unit.reduced_in = self._backward
        for subscriber in tuple(unit.on_reduced):
            subscriber(unit)
        if unit.gradients is not None:
            unit.gradients.sharded.withdraw_offer()

    def finish_of(self, unit: Unit) -> None:
        """Finish all up to the last one of ``unit``."""
        while any(queued.unit is unit for queued in self._queue):
            self._finish_oldest()

    def finish_partials_of(self, unit: Unit) -> None:
        """Finish all up to the last one of ``unit`` that stops before the replicas."""
        while self._queue and any(
            each.unit is unit and not each.in_flight.is_full for each in self._queue
        ):
            self._finish_oldest()

    def abandon(self) -> None:
        """Drop all of them. Waits for what was started, and starts nothing: ranks may differ."""
        while self._queue:
            self._queue.popleft().in_flight.reduction.abandon()

    def finish_all(self) -> None:
        """Have every result in ``.grad``, or in its partial."""
        while self._queue:
            self._finish_oldest()


_backwards = itertools.count()  # of all roots, so that a unit needs to know one number only
_TOO_LATE = (
    "unit {!r} has got a gradient after its optimizer has stepped it in this backward: its "
    "parameters take part in something that autograd runs later. Step it in the ordinary way "
    "(detach() of what overlap_optimizer has returned)."
)


def _compare(unit: Unit, over_replicas: bool, divide_factor: float | None) -> None:
    """Raise unless all ranks reduce ``unit`` alike: a wrong factor shows in no collective."""
    assert unit.group is not None
    mesh_info = unit.group.spec.mesh_info
    groups = mesh_info.groups if over_replicas else [mesh_info.shard_group]
    factor = float(divide_factor or mesh_info.shard_count * mesh_info.replicate_count)
    how_far = ""
    if mesh_info.replicate_group is not None:
        how_far = " over shards and replicas" if over_replicas else " over the shards"
    for group in groups:
        check_fingerprint(
            f"the reduction of unit {unit.label!r}{how_far}, divided by {factor}", group
        )
