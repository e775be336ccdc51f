"""The optimizer step of one unit: take the gradients, step, record the end.

On a device the step is queued on the optimizer stream, beside the backward of other units. Units in
host memory are stepped by a worker thread as soon as their own gradients have arrived, unless
their step needs those of others too. A deferred step, which is clipped by the norm of all
gradients, follows when the unit is gathered next.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import CommStream, Pending, profiled
from meshard._engine.param_group import ParamGroup, ParamState
from meshard._engine.unit import Unit
from meshard._torch.dtensor import plain_of
from meshard._torch.private import without_torch_function
from meshard.clipping import scale_gradients
from meshard.optim.flat import FlatStepper, MakeOptimizer, States
from meshard.optim.flat_slices import OptimGroups

ChangeGradients = Callable[[Sequence[torch.Tensor]], None]  # clips them in place
_GRADIENT = attrgetter("grad")


class WorkerStep:
    """A step that a worker thread takes, as a ``Pending``."""

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

    ``work`` is its end. A deferred step has none yet, but the ``coefficient`` that clips it.
    """

    def __init__(
        self, stepper: UnitStepper, work: Pending | None, coefficient: torch.Tensor | None = None
    ) -> None:
        self._stepper = stepper
        self._work = work
        self._coefficient = coefficient

    def before_gather(self) -> None:
        """Order the next gather of the unit after the step, which is taken now if it was deferred.

        **Stream:** the gather stream waits; the host for a step in host memory.
        """
        group = self._stepper.group
        if group.storage.host_copies is not None:
            self.finish()
        else:
            group.comm.enter_after(CommStream.GATHER, self._begun())

    def finish(self) -> None:
        """Order what the caller does next after the step, which is taken now if it was deferred.

        **Stream:** the current one waits.
        """
        work = self._begun()
        try:
            work.wait()
        finally:
            # On a device the next gather has still to wait, from whatever stream it is started.
            if work.poll():
                self._stepper.group.pending_step = None

    def _begun(self) -> Pending:
        if self._work is None:
            device = self._stepper.params[0].device.type
            # The next forward may run under other modes than step() did.
            with torch.inference_mode(mode=False), torch.autocast(device, enabled=False):
                self._work = self._stepper.run(self._coefficient)
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
        # Of each parameter to be stepped: itself and its gradient.
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def group(self) -> ParamGroup:
        """The parameters of the unit."""
        group = self._group()
        assert group is not None
        return group

    def is_of(self, unit: Unit) -> bool:
        """Whether it still steps the parameters of ``unit``."""
        return self._group() is unit.group

    def take(self, groups: OptimGroups, state: States) -> bool:
        """Take gradients out of ``.grad``, and hyperparameters, for ``step`` or ``defer``.

        ``groups`` are all of the optimizer. Returns whether any parameter has a gradient.
        """
        group = self.group
        gradients, sharded = group.gradients, group.gradients.sharded
        # The worker waits for copies from the device by itself; clipping reads the values here.
        if self._change is not None or not sharded.are_shown:
            gradients.settle()
        if not self.has_gradients():
            return False
        if group.state is ParamState.GATHERING:
            group.reshard()  # a prefetch that was not used has old weights
        group.finish_pending_step()  # that of another optimizer
        with without_torch_function():
            pairs = zip(self.params, map(_GRADIENT, self.params), strict=True)
            self.taken = [(param, grad) for param, grad in pairs if grad is not None]
        with self._on_stream(group), torch.no_grad(), profiled("optimizer", group.label):
            if self._change is not None:
                self._change([grad for _, grad in self.taken])
            members = self._members.items()
            self.flat.take([_taken(groups[number], own) for number, own in members], state)
        with without_torch_function():
            for param in self.params:
                param.grad = None
        group.record_step()
        return True

    def step(self, coefficient: torch.Tensor | None = None) -> None:
        """Step by what was taken, scaled by ``coefficient``."""
        group, flat = self.group, self.flat
        host_copies = group.storage.host_copies
        if host_copies is not None and flat.is_flat and coefficient is None:
            self.taken = []

            def wait_and_step() -> None:
                host_copies.wait()
                with torch.no_grad():
                    flat.run()

            group.pending_step = PendingStep(self, WorkerStep(self._worker.submit(wait_and_step)))
            return
        if host_copies is not None:
            host_copies.wait()
        work = self.run(coefficient)
        if self._is_beside(group):
            group.pending_step = PendingStep(self, work)

    def defer(self, coefficient: torch.Tensor) -> None:
        """Step by what was taken, scaled by ``coefficient``, before the next gather of the unit."""
        if self._is_gathered:
            self.group.pending_step = PendingStep(self, None, coefficient)
        else:
            self.step(coefficient)

    def run(self, coefficient: torch.Tensor | None = None) -> Pending:
        """Step by what was taken, scaled by ``coefficient`` in place; return the end of the step.

        **Stream:** the optimizer stream.
        """
        group, grads, self.taken = self.group, self.taken, []
        loose = [] if self.flat.is_flat else grads
        with self._on_stream(group), torch.no_grad(), profiled("optimizer", group.label):
            used = [plain_of(grad) for _, grad in grads]
            if coefficient is not None:
                scale_gradients(self.flat.gradients(grads), coefficient)
                used.append(coefficient)
            for param, grad in loose:
                param.grad = grad
            self.flat.run()
            for param, _ in loose:
                param.grad = None
            group.comm.hold_until_done(used)
            return group.comm.record()

    def has_gradients(self) -> bool:
        """Whether any ``.grad`` is set; gradients on their way to host memory are not yet."""
        with without_torch_function():
            return sum(map(is_, map(_GRADIENT, self.params), repeat(None))) < len(self.params)

    @property
    def _is_gathered(self) -> bool:
        """Whether a gather comes before each use; plain tensors (replicate) are read without."""
        return isinstance(self.params[0], DTensor)

    def _is_beside(self, group: ParamGroup) -> bool:
        """Whether steps run on a stream of their own."""
        is_on_device = group.storage.host_copies is None
        return not group.comm.waits_block_host and is_on_device and self._is_gathered

    def _on_stream(self, group: ParamGroup) -> contextlib.AbstractContextManager[None]:
        if self._is_beside(group):
            return group.comm.on_stream(CommStream.OPTIMIZER)
        return contextlib.nullcontext()


def _taken(group: dict[str, Any], params: list[torch.Tensor]) -> dict[str, Any]:
    """Return a param group as it is now: a scheduler writes to tensors in it."""
    present = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
    }
    return {**present, "params": params}
