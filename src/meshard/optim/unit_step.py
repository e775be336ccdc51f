"""The optimizer step of one unit: take the gradients, step, record the end.

On a device the step is queued on the optimizer stream, beside the backward of other units. Units in
host memory are stepped by a worker thread as soon as their own gradients have arrived. With a
deferred step the gradients are taken at once, and the rest follows when their norm is known.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import CommStream, InFlight, profiled
from meshard._engine.param_group import ParamGroup, ParamState
from meshard._engine.unit import Unit
from meshard._torch.dtensor import plain_of
from meshard._torch.private import without_torch_function
from meshard.clipping import scale_gradients
from meshard.optim.deferred_clip import DeferredWindow
from meshard.optim.flat import FlatStepper, MakeOptimizer, States
from meshard.optim.flat_slices import OptimGroups

_GRADIENT = attrgetter("grad")
ChangeGradients = Callable[[Sequence[torch.Tensor]], None]


class HostWorker:
    """A thread that steps units in host memory, in the order of their reductions."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, group: ParamGroup, step: Callable[[], object]) -> WorkerStep:
        """Run ``step`` once the gradients of ``group`` have arrived in host memory."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="meshard optimizer")
        host_copies = group.storage.host_copies
        assert host_copies is not None

        def wait_and_step() -> None:
            host_copies.wait()
            with torch.no_grad():
                step()

        return WorkerStep(self._pool.submit(wait_and_step))


class WorkerStep:
    """A step that a worker thread takes, as an ``InFlight``."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until the step is over. Raises what the optimizer has raised."""
        self._future.result()

    def poll(self) -> bool:
        """Return whether the step is over."""
        return self._future.done()


class PendingStep:
    """The step of one unit, from taking its gradients until the unit's next gather is there.

    Args:
        group: Parameters of the unit.
        work: The end of the step; None: the step is deferred.
        stepper: Takes a deferred step.
        window: Norm by which the gradients of a deferred step are clipped.
    """

    def __init__(
        self,
        group: ParamGroup,
        work: InFlight | None,
        *,
        stepper: UnitStepper | None = None,
        window: DeferredWindow | None = None,
    ) -> None:
        self._group = weakref.ref(group)
        self._work = work
        self._stepper = stepper
        self._window = window

    def before_gather(self) -> None:
        """Order the next gather of the unit after the step, which is taken now if it was deferred.

        **Collective:** as ``DeferredWindow.close``. **Stream:** the gather stream waits; for a step
        in host memory the host does.
        """
        group = self._group()
        if group is None:
            return
        if group.storage.host_copies is not None:
            self.finish()
        else:
            group.comm.enter_after(CommStream.GATHER, self._begun())

    def finish(self) -> None:
        """Order what the caller does next after the step, which is taken now if it was deferred.

        **Collective:** as ``DeferredWindow.close``. **Stream:** the current one waits.
        """
        group = self._group()
        if group is not None and group.has_failed:
            self.abandon()  # on this rank alone, maybe: it must not communicate
            if group.pending_step is None:
                return
        self._wait(self._begun())

    def abandon(self) -> None:
        """Drop a deferred step whose window was interrupted; finish a step that was begun."""
        group, window = self._group(), self._window
        if self._work is not None:
            self._wait(self._work)
        elif window is not None and not window.is_closed and group is not None:
            window.abandon()
            assert self._stepper is not None
            self._stepper.drop_taken()
            group.pending_step = None

    def _wait(self, work: InFlight) -> None:
        try:
            work.wait()
        finally:
            group = self._group()
            # On a device the next gather has still to wait, from whatever stream it is started.
            if group is not None and work.poll():
                group.pending_step = None

    def _begun(self) -> InFlight:
        if self._work is None:
            assert self._stepper is not None and self._window is not None
            self._work = self._stepper.run(self._window.close())
            self._stepper = self._window = None
        return self._work


class UnitStepper:
    """Steps those parameters of one unit that an optimizer holds.

    Args:
        unit: The unit.
        members: Its parameters, by the index of their param group.
        make: Makes an optimizer from param groups.
        is_pointwise: The optimizer may step slices of flat shards.
        worker: Steps the unit if its shards live in host memory.
        change: Clips gradients in place before the step.
    """

    def __init__(
        self,
        unit: Unit,
        members: Mapping[int, list[torch.Tensor]],
        make: MakeOptimizer,
        *,
        is_pointwise: bool,
        worker: HostWorker,
        change: ChangeGradients | None,
    ) -> None:
        assert unit.group is not None
        group = weakref.ref(unit.group)
        self._unit = weakref.ref(unit)
        self._members = dict(members)
        self._worker = worker
        self._change = change
        self.flat = FlatStepper(
            make,
            is_pointwise=is_pointwise,
            before_forgetting=functools.partial(_finish, group),
            on_replaced=functools.partial(_hold, group),
        )
        self.params = [param for params in members.values() for param in params]
        self.window = 0  # the last one in which the unit was stepped
        self._groups: OptimGroups = []  # as they were when gradients were taken
        self._state: States = {}
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []  # taken, and not stepped yet

    @property
    def may_have_gradients(self) -> bool:
        """Whether ``step`` may have anything to do: rarely, once backward has stepped."""
        unit = self._unit()
        if unit is None or unit.group is None:
            return False
        # Gradients on their way from the device are not in .grad yet.
        return self._has_gradients() or unit.group.storage.host_copies is not None

    def step(self, groups: OptimGroups, state: States) -> None:
        """Step by ``.grad``, if there is any, and drop it.

        Args:
            groups: All param groups of the optimizer.
            state: State of the optimizer.
        """
        group = self._take(groups, state, is_deferred=False)
        if group is None:
            return
        if group.storage.host_copies is None:
            work = self.run()
            if self._is_beside(group):
                group.pending_step = PendingStep(group, work)
        elif self.flat.is_flat:
            flat, taken = self.flat, self._groups
            self._grads = []
            group.pending_step = PendingStep(
                group, self._worker.submit(group, lambda: flat.run(taken, state))
            )
        else:
            group.storage.host_copies.wait()
            self.run()

    def defer(
        self, groups: OptimGroups, state: States, open_window: Callable[[], DeferredWindow]
    ) -> None:
        """Take the gradients out of ``.grad``, to step by them once the norm of all is known.

        Args:
            groups: As for ``step``; the hyperparameters of now count.
            state: Likewise.
            open_window: Returns the window of these gradients, if there are any.
        """
        group = self._take(groups, state, is_deferred=True)
        if group is not None:
            window = open_window()
            window.add(self._grads)
            group.pending_step = PendingStep(group, None, stepper=self, window=window)

    def run(self, coefficient: torch.Tensor | None = None) -> InFlight:
        """Step by what was taken.

        **Stream:** the optimizer stream.

        Args:
            coefficient: Factor for the gradients, which are scaled in place.

        Returns:
            The end of the step.
        """
        unit = self._unit()
        assert unit is not None and unit.group is not None
        group, grads, loose = unit.group, self._grads, self._grads
        self._grads = []
        if self.flat.is_flat:
            loose = []
        with self._on_stream(group), torch.no_grad(), profiled("optimizer", group.label):
            used = _locals(grads)
            if coefficient is not None:
                scale_gradients(used, coefficient)
                used.append(coefficient)
            for param, grad in loose:
                param.grad = grad
            self.flat.run(self._groups, self._state)
            for param, _ in loose:
                param.grad = None
            group.comm.hold_until_done(used)
            return group.comm.record()

    def finish(self) -> None:
        """Order what the caller does next after the last step."""
        unit = self._unit()
        if unit is not None and unit.group is not None:
            unit.group.finish_pending_step()

    def drop_taken(self) -> None:
        """Drop the gradients of a deferred step."""
        self._grads = []
        for flat_slice in self.flat.slices:
            flat_slice.flat.grad = None

    def _take(self, groups: OptimGroups, state: States, *, is_deferred: bool) -> ParamGroup | None:
        """Take gradients and hyperparameters; None: no parameter has a gradient."""
        unit = self._unit()
        if unit is None or unit.group is None or unit.gradients is None:
            return None
        group = unit.group
        # The worker waits for copies from the device by itself; clipping reads the values here.
        if is_deferred or self._change is not None or not unit.gradients.sharded.are_shown:
            unit.gradients.settle()
        if not self._has_gradients():
            return None
        if group.state is ParamState.GATHERING:
            group.reshard()  # a prefetch that was not used has old weights
        self.finish()  # the step of another optimizer
        with without_torch_function():
            gradients = map(_GRADIENT, self.params)
            pairs = zip(self.params, gradients, strict=True)
            grads = [(param, grad) for param, grad in pairs if grad is not None]
        with self._on_stream(group), torch.no_grad(), profiled("optimizer", group.label):
            if self._change is not None:
                self._change([grad for _, grad in grads])
            members = self._members.items()
            self._groups = [{**groups[number], "params": params} for number, params in members]
            self._state = state
            self.flat.take(self._groups, state)
        self._grads = grads
        with without_torch_function():
            for param in self.params:
                param.grad = None
        group.record_step()
        return group

    def _has_gradients(self) -> bool:
        with without_torch_function():
            num_without = sum(map(is_, map(_GRADIENT, self.params), repeat(None)))
        return num_without < len(self.params)

    def _is_beside(self, group: ParamGroup) -> bool:
        """Whether steps run on a stream of their own.

        Not for plain tensors (``replicate``): they are read without a gather that could wait.
        """
        return (
            not group.comm.waits_block_host
            and group.storage.host_copies is None
            and isinstance(self.params[0], DTensor)
        )

    def _on_stream(self, group: ParamGroup) -> contextlib.AbstractContextManager[None]:
        if self._is_beside(group):
            return group.comm.on_stream(CommStream.OPTIMIZER)
        return contextlib.nullcontext()


def _finish(ref: weakref.ref[ParamGroup]) -> None:
    group = ref()
    if group is not None:
        group.finish_pending_step()


def _hold(ref: weakref.ref[ParamGroup], tensors: Sequence[torch.Tensor]) -> None:
    group = ref()
    if group is not None:
        group.comm.hold_until_done(tensors)


def _locals(grads: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [plain_of(grad) for _, grad in grads]
