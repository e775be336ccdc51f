"""The optimizer step of one unit: take the gradients, step, record the end.

On a device the step is queued on the optimizer stream, beside the backward of other units. Units in
host memory are stepped by a worker thread as soon as their own gradients have arrived. With a
deferred step the gradients are taken at once, and the rest follows when their norm is known.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import CommStream, InFlight, profiled
from meshard._engine.param_group import ParamGroup, ParamState
from meshard._engine.unit import Unit
from meshard._torch.dtensor import plain_of
from meshard._torch.private import without_torch_function
from meshard.clipping import clip_coefficient, get_total_norm, scale_gradients
from meshard.optim.flat import FlatStepper, MakeOptimizer, States
from meshard.optim.flat_slices import OptimGroups

ChangeGradients = Callable[[Sequence[torch.Tensor]], None]  # clips them in place
_GRADIENT = attrgetter("grad")


class DeferredWindow:
    """The gradients of one window, from the first that is put aside to the norm of all."""

    def __init__(self, params: Sequence[torch.Tensor], max_norm: float) -> None:
        self._params = params  # norms are added up in this order
        self._max_norm = max_norm
        self.grads: dict[torch.Tensor, torch.Tensor] = {}  # by parameter
        self.total_norm: torch.Tensor | None = None  # known once it is closed
        self.coefficient: torch.Tensor | None = None
        self.is_void = False  # its backward was interrupted

    @property
    def is_open(self) -> bool:
        """Whether more gradients may come."""
        return self.coefficient is None and not self.is_void

    def close(self) -> torch.Tensor:
        """Return the factor that clips the gradients. **Collective:** the first time."""
        if self.coefficient is None:
            grads = [self.grads[param] for param in self._params if param in self.grads]
            self.grads.clear()
            self.total_norm = get_total_norm(grads)
            self.coefficient = clip_coefficient(self.total_norm, self._max_norm)
        return self.coefficient

    def abandon(self) -> None:
        """Drop all gradients."""
        self.grads.clear()
        self.is_void = True


class WorkerStep:
    """A step that a worker thread takes, as an ``InFlight``."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until the step is over. Raises what the optimizer has raised."""
        self._future.result()

    def poll(self) -> bool:
        """Whether the step is over."""
        return self._future.done()


class PendingStep:
    """The step of one unit, from taking its gradients until the unit's next gather is there.

    ``work`` is its end. A deferred step has none yet, but the ``window`` by which it is clipped.
    """

    def __init__(
        self, stepper: UnitStepper, work: InFlight | None, window: DeferredWindow | None = None
    ) -> None:
        self._stepper = stepper
        self._work = work
        self._window = window

    def before_gather(self) -> None:
        """Order the next gather of the unit after the step, which is taken now if it was deferred.

        **Collective:** if it was deferred. **Stream:** the gather stream waits; the host for a step
        in host memory.
        """
        group = self._stepper.group
        if group.storage.host_copies is not None:
            self.finish()
        else:
            group.comm.enter_after(CommStream.GATHER, self._begun())

    def finish(self) -> None:
        """Order what the caller does next after the step, which is taken now if it was deferred.

        **Collective:** if it was deferred. **Stream:** the current one waits.
        """
        group = self._stepper.group
        if group.has_failed:  # on this rank alone, maybe: it must not communicate
            self.abandon()
        if group.pending_step is self:
            self._wait(self._begun())

    def abandon(self) -> None:
        """Drop a deferred step whose window was interrupted; finish a step that was begun."""
        if self._work is not None:
            self._wait(self._work)
        elif self._window is not None and self._window.coefficient is None:
            self._window.abandon()
            self._stepper.drop_taken()
            self._stepper.group.pending_step = None

    def _wait(self, work: InFlight) -> None:
        try:
            work.wait()
        finally:
            # On a device the next gather has still to wait, from whatever stream it is started.
            if work.poll():
                self._stepper.group.pending_step = None

    def _begun(self) -> InFlight:
        if self._work is None:
            assert self._window is not None
            self._work = self._stepper.run(self._window.close())
        return self._work


class UnitStepper:
    """Steps those parameters of one unit that an optimizer holds. The unit is held weakly."""

    def __init__(
        self,
        group: ParamGroup,
        members: Mapping[int, list[torch.Tensor]],  # by the index of their param group
        *,
        make: MakeOptimizer,
        worker: Executor,  # for a unit whose shards live in host memory
        change: ChangeGradients | None,
    ) -> None:
        self._group = weakref.ref(group)
        self._members = members
        self._worker = worker
        self._change = change
        self.flat = FlatStepper(make, group)
        self.params = [param for params in members.values() for param in params]
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []  # taken, and not stepped yet

    @property
    def group(self) -> ParamGroup:
        """The parameters of the unit."""
        group = self._group()
        assert group is not None
        return group

    def is_of(self, unit: Unit) -> bool:
        """Whether it still steps the parameters of ``unit``."""
        return self._group() is unit.group

    def take(self, groups: OptimGroups, state: States, *, is_deferred: bool) -> bool:
        """Take gradients out of ``.grad``, and hyperparameters, for ``step`` or ``defer``.

        ``groups`` are all of the optimizer. Returns whether any parameter has a gradient.
        """
        group = self.group
        gradients, sharded = group.gradients, group.gradients.sharded
        # The worker waits for copies from the device by itself; clipping reads the values here.
        if is_deferred or self._change is not None or not sharded.are_shown:
            gradients.settle()
        if not self.has_gradients():
            return False
        if group.state is ParamState.GATHERING:
            group.reshard()  # a prefetch that was not used has old weights
        group.finish_pending_step()  # that of another optimizer
        with without_torch_function():
            pairs = zip(self.params, map(_GRADIENT, self.params), strict=True)
            self._grads = [(param, grad) for param, grad in pairs if grad is not None]
        with self._on_stream(group), torch.no_grad(), profiled("optimizer", group.label):
            if self._change is not None:
                self._change([grad for _, grad in self._grads])
            members = self._members.items()
            self.flat.take([{**groups[number], "params": own} for number, own in members], state)
        with without_torch_function():
            for param in self.params:
                param.grad = None
        group.record_step()
        return True

    def step(self) -> None:
        """Step by what was taken."""
        group, flat = self.group, self.flat
        host_copies = group.storage.host_copies
        if host_copies is not None and flat.is_flat:
            self._grads = []

            def wait_and_step() -> None:
                host_copies.wait()
                with torch.no_grad():
                    flat.run()

            group.pending_step = PendingStep(self, WorkerStep(self._worker.submit(wait_and_step)))
            return
        if host_copies is not None:
            host_copies.wait()
        work = self.run()
        if self._is_beside(group):
            group.pending_step = PendingStep(self, work)

    def defer(self, window: DeferredWindow) -> None:
        """Step by what was taken once the norm of all gradients of ``window`` is known."""
        window.grads.update(self._grads)
        self.group.pending_step = PendingStep(self, None, window)

    def run(self, coefficient: torch.Tensor | None = None) -> InFlight:
        """Step by what was taken, scaled by ``coefficient`` in place; return the end of the step.

        **Stream:** the optimizer stream.
        """
        group, grads, self._grads = self.group, self._grads, []
        loose = [] if self.flat.is_flat else grads
        with self._on_stream(group), torch.no_grad(), profiled("optimizer", group.label):
            used = [plain_of(grad) for _, grad in grads]
            if coefficient is not None:
                scale_gradients(used, coefficient)
                used.append(coefficient)
            for param, grad in loose:
                param.grad = grad
            self.flat.run()
            for param, _ in loose:
                param.grad = None
            group.comm.hold_until_done(used)
            return group.comm.record()

    def drop_taken(self) -> None:
        """Drop the gradients of a deferred step."""
        self._grads = []
        self.flat.drop_gradients()

    def has_gradients(self) -> bool:
        """Whether any ``.grad`` is set; gradients on their way to host memory are not yet."""
        with without_torch_function():
            return sum(map(is_, map(_GRADIENT, self.params), repeat(None))) < len(self.params)

    def _is_beside(self, group: ParamGroup) -> bool:
        """Whether steps run on a stream of their own."""
        return (
            not group.comm.waits_block_host
            and group.storage.host_copies is None
            # Plain tensors (replicate) are read without a gather that could wait.
            and isinstance(self.params[0], DTensor)
        )

    def _on_stream(self, group: ParamGroup) -> contextlib.AbstractContextManager[None]:
        if self._is_beside(group):
            return group.comm.on_stream(CommStream.OPTIMIZER)
        return contextlib.nullcontext()
