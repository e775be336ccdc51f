"""How is one unit stepped, while others are still in backward?

On a device the step is queued on a lane of its own, beside the backward of other units. Nothing
waits for it but what reads the shards next: the gather lane before the next gather of this very
unit, or whoever reads a parameter, by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import Lane, Queued, profiled
from meshard._params.dtensors import hide_locals, local_of, show_locals
from meshard._runtime.param_group import ParamGroup, Residence
from meshard._runtime.unit import Unit
from meshard.flat_snapshot import Groups
from meshard.flat_stepper import FlatStepper, States

ChangeGradients = Callable[[Sequence[torch.Tensor]], None]


class QueuedStep:
    """A step that is queued on a device: see ``StepUnderWay``.

    Args:
        group: Whose step.
        pending: The event that follows it.
    """

    def __init__(self, group: ParamGroup, pending: Queued) -> None:
        self._group = weakref.ref(group)
        self._params = [param.sharded for param in group.params]
        self._pending = pending
        hide_locals(self._params, self.finish)

    def before_gather(self) -> None:
        """Order the next use of the gather lane after it, and show the shards."""
        group = self._group()
        show_locals(self._params)
        if group is not None:
            group.comm.enter_after(Lane.GATHER, self._pending)

    def finish(self) -> None:
        """Order what the caller does next after it: a shard is about to be read."""
        show_locals(self._params)
        self._pending.wait()


class UnitStepper:
    """Steps the parameters of one unit that an optimizer holds.

    Args:
        unit: Which.
        members: Its parameters, by the number of their param group.
        flat: What steps them.
        change: Is given their gradients before the step, to clip them.
    """

    def __init__(
        self,
        unit: Unit,
        members: Mapping[int, list[torch.Tensor]],
        flat: FlatStepper,
        change: ChangeGradients | None,
    ) -> None:
        self._unit = weakref.ref(unit)
        self._members = dict(members)
        self._flat = flat
        self._change = change
        self.params = [param for params in members.values() for param in params]

    @property
    def label(self) -> str:
        """The name of the unit."""
        unit = self._unit()
        return "(deleted)" if unit is None else unit.label

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(param.grad is not None for param in self.params)

    def step(self, groups: Groups, state: States) -> bool:
        """Step by ``.grad``, and drop it. Return whether there was any.

        Args:
            groups: All param groups of the optimizer.
            state: Its state.
        """
        unit = self._unit()
        if unit is None or unit.group is None or unit.gradients is None:
            return False
        unit.gradients.settle()
        if not self.has_gradients:
            return False
        self._make_ready(unit.group)
        own = [{**groups[number], "params": params} for number, params in self._members.items()]
        comm = unit.group.comm
        with comm.lane(Lane.OPTIMIZER), torch.no_grad(), profiled("optimizer", unit.label):
            self.finish()  # of another optimizer, say
            self._step(own, state)
            comm.retire(self._locals())
            queued = comm.queued()
        self._drop_gradients(unit)
        unit.group.note_step()
        if not comm.waits_block_host:
            unit.group.stepping = QueuedStep(unit.group, queued)
        return True

    def finish(self) -> None:
        """Order what the caller does next after the last step."""
        unit = self._unit()
        if unit is not None and unit.group is not None and unit.group.stepping is not None:
            unit.group.stepping.finish()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop gradients, unless a step that is under way has taken them."""
        unit = self._unit()
        if unit is None or unit.group is None or unit.group.stepping is not None:
            return
        unit.group.finish_copies()
        for param in self.params:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach_().zero_()
        unit.group.clear_pending(set(map(id, self.params)))

    @staticmethod
    def _make_ready(group: ParamGroup) -> None:
        if group.residence is Residence.GATHERING:
            group.reshard()  # it was predicted, but not used; and it would be of old weights

    def _step(self, own: list[dict[str, Any]], state: States) -> None:
        if self._change is not None:
            self._change([param.grad for param in self.params if param.grad is not None])
        self._flat.take(own, state)
        self._flat.run(own, state)

    def _locals(self) -> list[torch.Tensor]:
        grads = (param.grad for param in self.params)
        return [local_of(g) if isinstance(g, DTensor) else g for g in grads if g is not None]

    def _drop_gradients(self, unit: Unit) -> None:
        assert unit.gradients is not None
        for param in self.params:
            param.grad = None
        unit.gradients.sharded.release_cleared()
