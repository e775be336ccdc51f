"""What happens at each moment of a step.

At the end of a backward, unless more of the same window are to come; at the end of an evaluation;
when reductions are finished by hand; and when an interrupted step is cleaned up. In between, shards
and gradients in host memory belong to the device.

Every rank must issue the same collectives in the same order, also when ranks use different
parameters of a unit. Gathers follow the order of the modules. A reduction is issued once a unit's
gradients are complete, and at the latest when an earlier unit begins its backward; a unit that
contains others comes after them, whenever its own gradients were complete. So the order depends
on which units ran, never on which of their parameters got a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from meshard._comm.communicator import Communicator
from meshard._engine.autograd_calls import num_nested
from meshard._engine.manual_unshard import end_manual_unshard
from meshard._engine.prefetch import Ahead, Prefetcher
from meshard._engine.retained import RetainedUnits
from meshard._engine.schedule import ForwardCall, ForwardPass, Phase, StepSchedule
from meshard._engine.unit import Unit
from meshard._gradients.reduce_queue import Reductions
from meshard._gradients.replicated_grads import ReplicatedGrads
from meshard._torch.private import skip_dynamo
from meshard.policies import GradientSync


class BackwardEvents(Protocol):
    """Who wants to know: see ``lifecycle``."""

    def finish_backward(self) -> None:
        """Autograd is done."""

    def record_failure(self) -> None:
        """A backward has raised."""


class EndOfBackward:
    """Runs at the end of a backward, or learns that there was none.

    Autograd destroys its callbacks without calling them when a backward raises.
    """

    def __init__(self, lifecycle: BackwardEvents) -> None:
        self._lifecycle = weakref.ref(lifecycle)
        self._was_called = False

    @skip_dynamo
    def __call__(self) -> None:
        """Finish the backward."""
        self._was_called = True
        lifecycle = self._lifecycle()
        if lifecycle is None:
            return
        try:
            lifecycle.finish_backward()
        except BaseException:
            lifecycle.record_failure()  # or all that follows would be taken for a recomputation
            raise

    def __del__(self) -> None:
        lifecycle = self._lifecycle()
        if lifecycle is not None and not self._was_called:
            lifecycle.record_failure()


class HostWaits:
    """The units of a root whose shards live in host memory; usually none."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []

    def watch(self, units: Iterable[Unit]) -> None:
        """Wait for those of ``units`` that need it from now on."""
        self._units = [
            weakref.ref(unit)
            for unit in units
            if unit.group is not None and unit.group.tensors.host_copies is not None
        ]

    def settle(self) -> None:
        """Wait until nothing moves, and have all gradients in ``.grad``. Blocks the host."""
        for ref in self._units:
            unit = ref()
            if unit is None or unit.gradients is None:
                continue
            if unit.group is None or unit.group.pending_step is None:  # else an optimizer waits
                unit.gradients.settle()


class HiddenGrads:
    """The buckets of a root; none, unless ``replicate`` was applied to it."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []

    def watch(self, units: Iterable[Unit]) -> None:
        """Look after those of ``units`` that keep their parameters whole, from now on."""
        self._units = [weakref.ref(unit) for unit in units if _grads_of(unit) is not None]

    def _all(self) -> Iterator[tuple[Unit, ReplicatedGrads]]:
        for ref in self._units:
            unit = ref()
            grads = None if unit is None else _grads_of(unit)
            if unit is not None and grads is not None:
                yield unit, grads

    def hide(self, early: tuple[Unit, int] | None) -> None:
        """A backward begins.

        Args:
            early: A unit and a parameter of it that has got its gradient already.
        """
        for unit, grads in self._all():
            grads.hide(early[1] if early is not None and early[0] is unit else None)

    def show(self) -> None:
        """A backward is over."""
        for _, grads in self._all():
            grads.show()


def _grads_of(unit: Unit) -> ReplicatedGrads | None:
    grads = None if unit.gradients is None else unit.gradients.sharded
    return grads if isinstance(grads, ReplicatedGrads) else None


def mark_units_failed(units: Iterable[Unit]) -> None:
    """A backward has raised. Called while the exception is on its way: do not communicate."""
    for unit in units:
        if unit.group is not None:
            unit.group.install_sharded()
            unit.group.has_failed = True


def has_open_window(units: Iterable[Unit]) -> bool:
    """Whether microbatches have been accumulated, and the last one has not come."""
    return any(unit.gradients is not None and unit.gradients.is_window_open for unit in units)


def put_to_rest(units: Iterable[Unit], *, is_void: bool) -> None:
    """Have units be as between two steps.

    Args:
        units: With nothing on its way.
        is_void: Forget their gradients too.
    """
    for unit in units:
        unit.reset_step()
        if unit.group is not None:
            if is_void and unit.group.pending_step is not None:
                unit.group.pending_step.abandon()
            unit.group.reshard()
            unit.group.has_failed = False
        if unit.gradients is not None:
            unit.gradients.drop_arrived()
            unit.gradients.forget_in_flight()
            if is_void:
                unit.gradients.clear_window()


class Lifecycle:
    """The steps of one root and all units inside it.

    Args:
        queue_callback: Has autograd call something when the present backward ends.
        comm: What all units talk through: their collectives share its lanes.
    """

    def __init__(
        self, queue_callback: Callable[[Callable[[], None]], None], comm: Communicator
    ) -> None:
        self.phase = Phase.RESTING
        self.is_last_backward = True
        self.has_failed = False  # a backward ended in an exception
        self.schedule = StepSchedule()
        self._queue_callback = queue_callback
        self.comm = comm  # given to every unit
        self._units: list[weakref.ref[Unit]] = []
        self._open: list[tuple[Unit, ForwardCall]] = []
        self._resume = Phase.RESTING  # the phase around a backward
        self._num_backwards = self._nested_before = 0
        self._prefetcher = Prefetcher(self._units)
        self._reductions = Reductions(comm)
        self.retained = RetainedUnits()
        self._host_waits = HostWaits()
        self._hidden_grads = HiddenGrads()

    def set_units(self, units: list[Unit]) -> None:
        """Take these units over, given in module order, outermost first."""
        self._units[:] = [weakref.ref(unit) for unit in units]
        self._host_waits.watch(units)
        self._hidden_grads.watch(units)
        for number, unit in enumerate(units):
            unit.number = number
            unit.lifecycle = self
            if unit.group is not None:
                unit.group.tensors.label = unit.label
        self.use(self.comm)

    def use(self, comm: Communicator) -> None:
        """Talk through ``comm`` from now on. Nothing may be on its way."""
        self._reductions.finish_all()
        self.comm, self._reductions = comm, Reductions(comm)
        for unit in self.units():
            if unit.group is not None:
                unit.group.comm = comm.with_custom(unit.settings.comm)

    def units(self) -> Iterator[Unit]:
        """Iterate over the units, in module order."""
        for ref in self._units:
            unit = ref()
            if unit is not None:
                yield unit

    # --- forward ---------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """A module of ``unit`` is about to run."""
        if self.has_failed:
            self.abort()
        if self.phase is Phase.RESTING:
            self.retained.begin_forward()
            self._reductions.begin_forward()
            self.schedule.begin_forward(with_graph=torch.is_grad_enabled())
            self.phase = Phase.FORWARD
        if self.phase is Phase.FORWARD:
            self._open.append((unit, self.schedule.enter(unit.number)))
        group = unit.group
        if group is None:
            return
        if unit.gradients is not None:
            unit.gradients.sharded.release_cleared()
        if self.phase is Phase.FORWARD:
            group.forget_stale(leftover=unit.settings.reshard_after_forward is None)
            ahead = self._prefetcher.after_entry(unit, self.schedule)
        else:
            ahead = Ahead([], False)  # a recomputation: backward knows what is next
        keeps_post_forward_shard = (
            unit.settings.post_forward_group is not None and torch.is_grad_enabled()
        )
        self._prefetcher.unshard(
            unit, ahead, keep=keeps_post_forward_shard and unit.reshards_after_forward
        )
        group.install_unsharded(read_flags=self.phase is Phase.FORWARD)
        if group.num_trainable:
            unit.step.record_forward(with_graph=torch.is_grad_enabled())

    def post_forward(self, unit: Unit, module_position: int, *, failed: bool) -> ForwardCall | None:
        """A module of ``unit`` has run, or raised. Return the call that this was."""
        group = unit.group
        if self.phase is Phase.BACKWARD:
            # A recomputation; checkpointing may stop one by an exception.
            if group is not None and not unit.step.is_in_backward:
                group.install_sharded()
            return self.schedule.present.last_call.get(unit.number)
        call = None
        if self._open and self._open[-1][0] is unit:
            call = self._open.pop()[1]
            self.schedule.exit(call)
        if self._is_open(unit):
            return call  # a module that called itself
        if group is not None:
            group.install_sharded()
        unit.step.modules_run.add(module_position)
        if group is not None and (failed or unit.may_reshard):
            group.reshard(keep=not failed)
        elif group is not None and not self._open:
            unit.mark_leftover()
        if not self._open:
            self._end_forward(failed=failed)
        return call

    def _is_open(self, unit: Unit) -> bool:
        return bool(self._open) and any(other is unit for other, _ in self._open)

    def _end_forward(self, *, failed: bool) -> None:
        self.phase = Phase.RESTING
        if failed:
            self.abort()
            return
        self._prefetcher.drop_unused()
        if not torch.is_grad_enabled():
            self._host_waits.settle()  # whoever evaluates may edit shards next
        for unit in self.units():
            if unit.step.modules_run:
                if unit.group is not None and unit.reshards_after_forward:
                    unit.group.reshard(keep=True)  # of several modules, not all have run
                unit.step.modules_run.clear()

    def running(self) -> list[Unit]:
        """Return the units whose forward has begun and not ended, outermost first."""
        return [unit for unit, _ in self._open]

    def is_running(self, unit: Unit) -> bool:
        """Whether the outermost forward that has begun and not ended is that of ``unit``."""
        return bool(self._open) and self._open[0][0] is unit

    # --- backward --------------------------------------------------------------------------

    def _begin_backward(self, early: tuple[Unit, int] | None = None) -> None:
        if self.has_failed:
            self.abort()
        if self.phase is not Phase.BACKWARD:
            self._resume, self.phase = self.phase, Phase.BACKWARD
            self._num_backwards += 1
            self._nested_before = num_nested()
            self._reductions.begin_backward()
            self._queue_callback(EndOfBackward(self))
            self._hidden_grads.hide(early)
            self.retained.begin_backward()

    def pre_backward(
        self, unit: Unit, of: ForwardPass, call: ForwardCall, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """The first gradient of an output of ``unit`` is there."""
        self._begin_backward()
        for number in StepSchedule.over_before(of, call, self._num_backwards):
            other = self._units[number]()
            if other is not None and other is not unit:
                self._complete(other, of)
        self.schedule.in_backward = unit.step.in_pass = of
        unit.step.in_call = call
        if unit.group is None:
            return None
        if unit.group.manual_unshard is not None:
            # Before the graph of forward lets go of what another one may hold.
            end_manual_unshard(unit.group, refuse=False)
        if not unit.step.is_in_backward:
            unit.step.is_in_backward = True
            unit.step.awaits_gradients |= unit.group.num_trainable > 0
        used = None
        if unit.settings.unshard_in_backward:
            ahead = self._prefetcher.after_backward_of(unit, of, call)
            self._prefetcher.unshard(unit, ahead, keep=False)
            # Checkpointing may run parts of forward again
            unit.group.install_unsharded(read_flags=False)
            used = self.retained.on_backward(unit, gradient)
        if unit.step.arrived and unit.step.has_all(unit.group.num_trainable):
            self._on_complete_gradients(unit)  # they were complete in a later call
        return used

    def gradient_arrived(self, unit: Unit, index: int) -> None:
        """The whole gradient of one parameter is complete."""
        if self.phase is not Phase.BACKWARD or self.has_failed:
            self._begin_backward((unit, index))
        step, group = unit.step, unit.group
        assert group is not None
        step.awaits_gradients = True
        step.arrived.add(index)
        if step.has_all(group.num_trainable):
            # Not freed yet: a node may have saved a weight without contributing to its gradient.
            self._on_complete_gradients(unit)
        elif self._reductions.has_sent_input:
            self._reductions.free_input_if_sent()

    @property
    def backward_number(self) -> int:
        """Number of the backward that runs, or of the next one."""
        return self._num_backwards + (self.phase is not Phase.BACKWARD)

    def gradient_joins(self, unit: Unit) -> None:
        """A whole gradient comes from outside the unit's forward. Reduced once all is over."""
        self._begin_backward()
        unit.step.awaits_gradients = True

    def _on_complete_gradients(self, unit: Unit) -> None:
        is_whole = num_nested() == self._nested_before  # else checkpoints hand over parts
        if is_whole and not self.schedule.runs_before(unit.step.in_pass, unit.number):
            unit.step.is_ready = True
            self._reduce_if_ready(unit)

    def _complete(self, unit: Unit, of: ForwardPass | None = None) -> None:
        """Nothing of this unit is left to run in this backward, or (``of``) in that of a pass."""
        if self._is_open(unit):
            return  # a backward inside the forward of this unit
        unit.step.end_backward()
        if unit.group is not None:
            unit.group.install_sharded()
            if unit.settings.reshard_after_backward and not unit.step.is_retained:
                unit.group.reshard()
        if of is not None and self.schedule.runs_before(of, unit.number):
            return
        if unit.step.awaits_gradients:
            unit.step.is_ready = True
            self._reduce_if_ready(unit)

    def _reduce_if_ready(self, unit: Unit) -> None:
        if (unit.step.awaits_gradients and not unit.step.is_ready) or unit.has_open_children:
            return
        if unit.step.is_ready:  # else nothing in it is trained
            unit.step.record_taken()
            self._take_gradients(unit)
        parent = unit.parent() if unit.parent is not None else None
        if parent is not None:
            self._reduce_if_ready(parent)

    def _take_gradients(self, unit: Unit) -> None:
        if unit.settings.sync is GradientSync.NONE:
            self._reductions.accumulate(unit)
            return
        is_full = unit.settings.sync is GradientSync.FULL
        ends_window = self.is_last_backward and is_full
        self._reductions.start(unit, over_replicas=is_full, ends_window=ends_window)

    def finish_backward(self) -> None:
        """Autograd is done: sweep up what never came, and finish what was started."""
        units = list(self.units())
        self.schedule.end_backward()
        self.retained.end_backward()
        for unit in reversed(units):  # what is inside comes before what is around it
            self._complete(unit)
        for unit in reversed(units):
            if unit.settings.sync is GradientSync.FULL:
                # It may have got nothing today, but hold something.
                self.flush(unit, ends_window=self.is_last_backward)
        if self.is_last_backward:
            self._reductions.finish_all()
            for unit in reversed(units):
                if unit.on_reduced and unit.settings.sync is GradientSync.FULL:
                    self._reductions.signal(unit)
            self._host_waits.settle()
        self._prefetcher.drop_unused()
        self._hidden_grads.show()
        self.phase = self._resume

    def flush(self, unit: Unit, *, ends_window: bool = True) -> None:
        """Reduce fully what a unit has accumulated, if anything."""
        if self.has_failed:
            self.abort()
        if unit.gradients is not None:
            self._reductions.finish_partials_of(unit)
            if unit.gradients.is_pending:
                self._reductions.start(unit, over_replicas=True, ends_window=ends_window)
            unit.gradients.close_window()

    def end_window(self, unit: Unit) -> None:
        """The gradient of a window is in ``.grad``, whatever backwards have said."""
        if unit.on_reduced:
            self._reductions.signal(unit)

    def finish_reductions(self) -> None:
        """Have every reduction that was started in ``.grad``, or in its partial."""
        if self.has_failed:
            self.abort()
        self._reductions.finish_all()
        self._host_waits.settle()

    # --- when something went wrong ---------------------------------------------------------

    def record_failure(self) -> None:
        """A backward has raised. Called while the exception is on its way: do not communicate."""
        self.has_failed = True  # the next step begins with abort()
        self._prefetcher.forget()
        self._open.clear()
        mark_units_failed(self.units())

    def is_between_steps(self) -> bool:
        """Whether no module runs, forward or backward. Ends a step that has failed."""
        if self.has_failed:
            self.abort()
        return self.phase is Phase.RESTING

    def abort(self) -> None:
        """Be as before a step: nothing whole, nothing on its way, no window open.

        What an interrupted window had accumulated is void, because its microbatches are not all
        there; gradients of a window that had ended stay, unless a backward has failed.
        """
        is_void = self.has_failed or not self._reductions.is_idle
        self.has_failed = False
        self.phase = self._resume = Phase.RESTING
        self._open.clear()
        self._prefetcher.forget()
        self.schedule.forget()
        self.retained.release()
        is_void = is_void or has_open_window(self.units())
        self._reductions.abandon()
        put_to_rest(self.units(), is_void=is_void)
        self._hidden_grads.show()
        self._host_waits.settle()
