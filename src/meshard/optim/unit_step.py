"""The optimizer step of one unit during backward.

On a device the step is queued on a lane of its own, beside the backward of other units. Nothing
waits for it but what reads the shards next: the gather lane before the next gather of this very
unit, or whoever reads a parameter, by then.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import CommStream, RecordedWork, profiled
from meshard._comm.gradient_buffer import FlatGradients
from meshard._engine.param_group import ParamGroup, ParamState
from meshard._engine.unit import Unit
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._torch.dtensor import local_of
from meshard._torch.private import without_torch_function
from meshard.optim.device_steps import DeviceSteps, ReturningStep
from meshard.optim.flat import FlatStepper, States
from meshard.optim.flat_slices import Groups
from meshard.optim.joined_steps import JoinedSteps, WaitingStep
from meshard.optim.offloaded_step import HostWorker
from meshard.optim.pending_step import QueuedStep, finish_step

_GRADIENT = attrgetter("grad")
ChangeGradients = Callable[[Sequence[torch.Tensor]], None]


class UnitStepper:
    """Steps the parameters of one unit that an optimizer holds.

    Args:
        unit: Which.
        members: Its parameters, by the number of their param group.
        flat: What steps them.
        joined: Steps it with others, if its gradients are small.
        worker: Steps it if its shards live in host memory.
        change: Is given their gradients before the step, to clip them.
    """

    def __init__(
        self,
        unit: Unit,
        members: Mapping[int, list[torch.Tensor]],
        flat: FlatStepper,
        *,
        joined: JoinedSteps,
        worker: HostWorker,
        change: ChangeGradients | None,
    ) -> None:
        self._unit = weakref.ref(unit)
        self._members = dict(members)
        self.flat = flat
        self._joined = joined
        self._worker = worker
        self._change = change
        self._num_refused = 0  # times in a row that gradients were not to be taken as they are
        self.numbers: Sequence[int] = list(members)
        self._lists: Groups = [{"params": params} for params in members.values()]
        self._device_steps: DeviceSteps | None = None
        if unit.group is not None:
            position = unit.group.spec
            if position.host is not None and position.host.step_device is not None:
                self._device_steps = DeviceSteps(
                    joined.make, position.host.step_device, position.host
                )
            group = weakref.ref(unit.group)
            flat.before_forgetting = functools.partial(_forget, group, joined)
            flat.on_replaced = functools.partial(_retire, group)
            self.waiting = WaitingStep(unit.group, joined)
        self.params = [param for params in members.values() for param in params]
        self.window = 0  # the last one in which it was stepped
        self.is_seen = False  # users have asked for the state
        self._taken: Groups = []  # the param groups of the unit, when gradients were taken
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a step that is put off

    @property
    def unit(self) -> Unit | None:
        """The unit, while its model lives."""
        return self._unit()

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        with without_torch_function():
            num_without = sum(map(is_, map(_GRADIENT, self.params), repeat(None)))
        return num_without < len(self.params)

    @property
    def may_have_gradients(self) -> bool:
        """Whether ``step`` may have anything to do: no, as a rule, once backward has stepped."""
        if self.has_gradients:
            return True
        unit = self._unit()
        if unit is None or unit.group is None or unit.gradients is None:
            return False
        # On their way from the device, or offered: not in .grad yet.
        return unit.group.tensors.host_copies is not None

    def step(self, groups: Groups, state: States) -> None:
        """Step by ``.grad``, if there is any, and drop it.

        Args:
            groups: All param groups of the optimizer.
            state: Its state.
        """
        unit = self._unit()
        if unit is None or unit.group is None or unit.gradients is None:
            return
        self._step_by_grad(groups, state)

    def _step_by_grad(self, groups: Groups, state: States, *, may_wait: bool = True) -> None:
        group = self._ready(may_be_on_its_way=self._change is None)
        if group is None:
            return
        comm = group.comm
        if group.tensors.host_copies is not None:
            self._step_on_host(group, groups, state)
            return
        # Whoever holds a plain tensor reads it, and nothing could wait for the step then.
        is_beside = not comm.waits_block_host and isinstance(self.params[0], DTensor)
        stream = comm.on_stream(CommStream.OPTIMIZER) if is_beside else contextlib.nullcontext()
        with stream, torch.no_grad(), profiled("optimizer", group.label):
            self._take(groups, state)
            is_joined = may_wait and self.flat.is_steady
            if not is_joined:
                self.flat.run(self._taken, state, is_seen=False)
            if is_beside:
                comm.hold_until_done(_locals(param.grad for param in self.params))
                if not is_joined:
                    group.pending_step = QueuedStep(group, comm.record())
        self._drop_gradients()
        if is_joined:
            self._joined.add(self, None, groups, state)
        else:
            group.record_step()

    def _step_on_host(self, group: ParamGroup, groups: Groups, state: States) -> None:
        with torch.no_grad():
            self._take(groups, state)
        taken, flat = self._taken, self.flat
        if flat.is_flat and self._device_steps is not None:
            self._drop_gradients()
            group.record_step()
            self._step_on_device(group, state, self._device_steps)
            return
        if flat.is_flat:
            self._drop_gradients()
            group.record_step()
            self._worker.submit(group, lambda: flat.run(taken, state))
            return
        group.finish_copies()
        with torch.no_grad():
            flat.run(taken, state)
        self._drop_gradients()
        group.record_step()

    def _step_on_device(self, group: ParamGroup, state: States, steps: DeviceSteps) -> None:
        comm, host_copies = group.comm, group.tensors.host_copies
        assert host_copies is not None
        with (
            comm.on_stream(CommStream.OPTIMIZER),
            torch.no_grad(),
            profiled("optimizer", group.label),
        ):
            host_copies.begin_step()
            self.flat.run(self._taken, state, is_seen=False, by=steps.step)
            queued = comm.record()
        host_copies.end_step(queued)
        group.pending_step = ReturningStep(group, queued)

    # --- together with other units: see ``Joinable`` ---------------------------------------

    @property
    def group(self) -> ParamGroup | None:
        """The parameters of the unit, while its model lives."""
        unit = self._unit()
        return None if unit is None else unit.group

    def take(self, flat_grads: FlatGradients, state: States) -> bool:
        """Take gradients before there is a ``.grad``; False: there must be."""
        group = self.group
        assert group is not None
        is_taken = self.flat.take_reduced(
            flat_grads, group, self._lists, state, is_seen=self.is_seen
        )
        self._num_refused = 0 if is_taken else self._num_refused + 1
        return is_taken

    def record_stepped(self, state: States) -> None:
        """Note that what was taken has been stepped."""
        self.flat.end_step(self._lists, state)

    def step_apart(self, flat_grads: FlatGradients, groups: Groups, state: States) -> None:
        """Step by gradients that could not be taken as they are."""
        unit = self._unit()
        if unit is None or unit.gradients is None:
            return
        assert isinstance(unit.gradients.sharded, ShardedGrads)
        unit.gradients.sharded.publish(flat_grads)
        self._step_by_grad(groups, state, may_wait=False)

    # --- in two halves, for a step that is put off -----------------------------------------

    def put_aside(self, groups: Groups, state: States) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take the gradients away from ``.grad``, to step by them in ``run``.

        Args:
            groups: As for ``step``; the hyperparameters of now count.
            state: Likewise.

        Returns:
            Each parameter that has one, with its gradient.
        """
        group = self._ready()
        if group is None:
            return []
        with group.comm.on_stream(CommStream.OPTIMIZER), torch.no_grad():
            self._take(groups, state)
        self._grads = [(param, param.grad) for param in self.params if param.grad is not None]
        self._drop_gradients()
        group.record_step()
        return self._grads

    def run(self, state: States, change: ChangeGradients, *keep: torch.Tensor) -> RecordedWork:
        """Step by what ``put_aside`` has taken.

        **Stream:** the optimizer's lane.

        Args:
            state: Of the optimizer.
            change: Is given the gradients, as local tensors that may be of several parameters.
            *keep: Tensors that ``change`` reads.

        Returns:
            What follows the step.
        """
        unit, grads = self._unit(), self._grads
        self._grads = []
        assert unit is not None and unit.group is not None
        comm = unit.group.comm
        with (
            comm.on_stream(CommStream.OPTIMIZER),
            torch.no_grad(),
            profiled("optimizer", unit.label),
        ):
            change(_locals(grad for _, grad in grads))
            for param, grad in () if self.flat.is_flat else grads:
                param.grad = grad
            self.flat.run(self._taken, state)
            for param, _ in () if self.flat.is_flat else grads:
                param.grad = None
            comm.hold_until_done([*_locals(grad for _, grad in grads), *keep])
            return comm.record()

    def show(self) -> None:
        """Have the state as the ordinary optimizer has it; users ask for it."""
        self.is_seen = True
        self.flat.catch_up()

    def forget(self) -> None:
        """Drop what ``put_aside`` has taken."""
        self._grads = []
        self.flat.forget_slices()

    # --- around ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Order what the caller does next after the last step."""
        unit = self._unit()
        if unit is not None and unit.group is not None and unit.group.pending_step is not None:
            unit.group.pending_step.finish()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop gradients, unless a step that is under way has taken them."""
        unit = self._unit()
        if unit is None or unit.group is None or unit.group.pending_step is not None:
            return
        unit.group.finish_copies()
        if self.has_gradients:
            for param in self.params:
                if set_to_none or param.grad is None:
                    param.grad = None
                else:
                    param.grad.detach_().zero_()
        elif unit.gradients is None or not unit.gradients.pending:
            return
        unit.group.clear_pending(set(map(id, self.params)))

    def _ready(self, *, may_be_on_its_way: bool = False) -> ParamGroup | None:
        """Return the group if there is anything to step, and nothing of older weights is left.

        Args:
            may_be_on_its_way: Whoever reads the gradients waits for the copies to the host.
        """
        unit = self._unit()
        if unit is None or unit.group is None or unit.gradients is None:
            return None
        if not (may_be_on_its_way and unit.gradients.sharded.show_early()):
            unit.gradients.settle()
        if not self.has_gradients:
            return None
        self._drop_predicted(unit.group)
        return unit.group

    @staticmethod
    def _drop_predicted(group: ParamGroup) -> None:
        if group.state is ParamState.GATHERING:
            group.reshard()  # what was predicted, and not used, has old weights

    def _take(self, groups: Groups, state: States) -> None:
        self.finish()  # the step of another optimizer, say
        if self._change is not None:
            self._change([param.grad for param in self.params if param.grad is not None])
        members = self._members.items()
        self._taken = [{**groups[number], "params": params} for number, params in members]
        self.flat.take(self._taken, state, is_seen=self.is_seen)

    def _drop_gradients(self) -> None:
        unit = self._unit()
        assert unit is not None and unit.group is not None and unit.gradients is not None
        for param in self.params:
            param.grad = None
        unit.gradients.sharded.release_cleared()


def _forget(ref: weakref.ref[ParamGroup], joined: JoinedSteps) -> None:
    finish_step(ref)
    joined.forget()


def _retire(ref: weakref.ref[ParamGroup], tensors: Sequence[torch.Tensor]) -> None:
    group = ref()
    if group is not None:
        group.comm.hold_until_done(tensors)


def _locals(grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [local_of(g) if isinstance(g, DTensor) else g for g in grads if g is not None]
