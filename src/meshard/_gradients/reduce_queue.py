"""Reductions in flight.

A reduction has one or two stages: the reduce-scatter, and with replicas the all-reduce. On a device
both are queued at once, and the stream waits for the result later. On CPU a wait blocks the host.
There a reduction ends a stage and starts the next when the reduction of a later unit starts, and
the compute between two such starts hides the communication. The order of stages depends only on the
order in which reductions start, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from meshard._comm.communicator import DONE, Communicator, Handle, log_event, ranged
from meshard._gradients.accumulator import (
    Gradients,
    ReduceSettings,
    check_divide_factor,
    unrecorded,
)
from meshard.foreach_reduce import Reduction

_MOST = 3  # at most so many reductions in flight, unless the user sets a limit on CPU


class _Queued(NamedTuple):
    gradients: Gradients
    on_reduced: Callable[[], None] | None  # called once the result is added to .grad


class ReduceQueue:
    """The reductions in flight of all units of a model (one root), oldest first."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._queue: deque[_Queued] = deque()
        # Key: the id of a tensor or callable that the user has set as a divide factor. Value: the
        # object itself, kept alive so that its id stays unique, and the number read from it.
        self._factors: dict[int, tuple[object, float]] = {}
        self._leaving: Handle = DONE  # the copy of the last result to host memory

    def begin_backward(self) -> None:
        """Read divide factors anew. Finish reductions of replicated modules, whose buckets fill."""
        self.finish_while(lambda of: of.is_replicated)
        self._factors.clear()

    def divide_factor(self, settings: ReduceSettings) -> float | None:
        """Return the divide factor that the user has set; None: the number of ranks.

        A callable or a tensor is read once. The number is kept until the next backward begins.
        """
        chosen = settings.divide_factor
        if chosen is None or isinstance(chosen, float):
            return chosen
        if id(chosen) not in self._factors:
            factor = chosen() if callable(chosen) else chosen
            self._factors[id(chosen)] = chosen, check_divide_factor(factor)
        return self._factors[id(chosen)][1]

    def start(
        self,
        gradients: Gradients,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        ends_window: bool,
        on_reduced: Callable[[], None] | None,
    ) -> None:
        """Start reducing the gradients of a unit. On CPU, first advance the earlier reductions.

        **Collective:** the ranks of earlier reductions, for their next stages; then the ranks of
        sums over other mesh axes (TP), and the unit's shard group. With ``over_replicas`` the
        replica group follows: on a device at once, on CPU as this reduction advances.
        """
        if gradients.is_in_flight:
            # The earlier reduction of this unit may return a sum over shards that this one adds.
            self.finish_while(lambda of: of is gradients)
        is_cpu, chosen = self._comm.waits_block_host, settings.max_input_buffers
        if not is_cpu:
            # This reduction allocates a send buffer, so free older buffers beyond the limit. The
            # stream waits for the reduce-scatters that read these, which the backward of this unit
            # has mostly hidden. It does not wait for the all-reduces that follow them.
            sending = [each for each in self._reductions() if each.sent is not None]
            for each in sending[: len(sending) + 1 - (chosen or 1)]:
                each.free_sent()
        while len(self._queue) >= (chosen if is_cpu and chosen else _MOST):
            self._finish_oldest()
        divide_factor = self.divide_factor(settings)
        if is_cpu:
            # First advance the earlier reductions, so that the new one can use memory that they
            # free. They were sending during the backward of this unit, so the wait is mostly short.
            self._advance()
        with unrecorded(), ranged("reduce", gradients.unit_params.label):
            has_started = gradients.start_reduce(
                settings,
                over_replicas=over_replicas,
                ends_window=ends_window,
                divide_factor=divide_factor,
            )
        if has_started:
            log_event("reduce", gradients.unit_params.label)
            self._queue.append(_Queued(gradients, on_reduced))

    def _reductions(self) -> list[Reduction]:
        return [of.reduction for of, _ in self._queue if of.reduction is not None]

    def _advance(self) -> None:
        """Advance each reduction by a stage. Finish the oldest ones that have no stage left."""
        for each in self._reductions():
            if each.has_more:
                each.advance()
        while self._queue:
            oldest = self._queue[0].gradients.reduction
            if oldest is not None and oldest.has_more:
                return
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        gradients, on_reduced = self._queue[0]
        with unrecorded():
            leaving = gradients.finish_reduce()
        self._queue.popleft()
        log_event("reduced", gradients.unit_params.label)
        # Wait for the copy of the previous result to the host. It keeps device memory until then.
        self._leaving.wait()
        self._leaving = leaving or DONE
        if on_reduced is not None:
            on_reduced()

    def finish_while(self, is_waited_for: Callable[[Gradients], bool]) -> None:
        """Finish reductions, oldest first, until the function is true for none that is left."""
        while any(is_waited_for(of) for of, _ in self._queue):
            self._finish_oldest()

    def finish_all(self) -> None:
        while self._queue:
            self._finish_oldest()
        self._leaving.wait()
        self._leaving = DONE

    def abandon(self) -> None:
        """Drop all reductions. Communicate nothing, because only some ranks may have failed."""
        for each in self._reductions():
            each.abort()
        self._queue.clear()
        self._leaving.release()
        self._leaving = DONE
