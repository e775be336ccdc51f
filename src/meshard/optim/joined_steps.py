"""Joined steps of small units.

To call an optimizer takes the host the same time for one tensor as for twenty. So a unit whose
gradient is small waits for the next ones, until they are worth a call; at the latest until the end
of the backward, or until someone needs one of them.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from meshard._comm.communicator import CommStream, Communicator, profiled
from meshard._comm.gradient_buffer import FlatGradients
from meshard._engine.param_group import ParamGroup
from meshard._torch.private import is_in_backward, queue_backward_callback
from meshard.optim.flat import FlatStepper, States
from meshard.optim.flat_slices import Groups
from meshard.optim.pending_step import QueuedStep

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


class WaitingStep:
    """A step that waits for those of other units: see ``PendingStep``.

    Args:
        group: Whose step.
        steps: Takes it.
    """

    def __init__(self, group: ParamGroup, steps: JoinedSteps) -> None:
        self._group = weakref.ref(group)
        self._steps = steps

    def before_gather(self) -> None:
        """Step, and order the next use of the gather lane after that."""
        queued = self._step()
        if queued is not None:
            queued.before_gather()

    def finish(self) -> None:
        """Step, and order what the caller does next after that: a shard is about to be read."""
        queued = self._step()
        if queued is not None:
            queued.finish()

    def abandon(self) -> None:
        """Forget it, and those that it waits for: their backward was interrupted."""
        self._steps.abandon()

    def _step(self) -> QueuedStep | None:
        self._steps.run()
        group = self._group()
        if group is None:
            return None
        if isinstance(group.pending_step, QueuedStep):
            return group.pending_step
        group.pending_step = None
        return None


class Joinable(Protocol):
    """The parameters that an optimizer has in one unit."""

    flat: FlatStepper
    numbers: Sequence[int]  # of the param groups in which it has parameters
    waiting: WaitingStep

    @property
    def group(self) -> ParamGroup | None:
        """Those of the unit, while its model lives."""

    def take(self, flat_grads: FlatGradients, state: States) -> bool:
        """Have ``flat`` take these gradients, if it can."""

    def record_stepped(self, state: States) -> None:
        """Note that what ``flat`` had taken was stepped."""

    def step_apart(self, flat_grads: FlatGradients, groups: Groups, state: States) -> None:
        """Step by these gradients at once."""


class _Joined(NamedTuple):
    """An optimizer over the runs of several units."""

    parts: list[Optimizer]  # those of the units
    unsharded: Optimizer
    step: Callable[[Optimizer], object]  # of its class
    numbers: list[int]  # for each of its param groups, which of ours


class JoinedSteps:
    """The units that wait to be stepped.

    Args:
        make: Makes an optimizer from param groups.
        min_bytes: They are stepped as soon as their gradients have so many.
    """

    def __init__(self, make: MakeOptimizer, min_bytes: int) -> None:
        self.make = make
        self._min_bytes = min_bytes
        self._waiting: list[tuple[Joinable, FlatGradients | None]] = []
        self._num_bytes = 0
        self._groups: Groups = []  # all param groups
        self._state: States = {}
        self._comm: Communicator | None = None  # of those that wait
        self._joined: dict[Joinable, _Joined] = {}  # by their first unit

    def add(
        self, unit: Joinable, flat_grads: FlatGradients | None, groups: Groups, state: States
    ) -> None:
        """Step a unit, soon.

        Args:
            unit: Which.
            held: Its gradients; None: ``unit.flat`` has taken them.
            groups: All param groups of the optimizer.
            state: Its state.
        """
        group = unit.group
        assert group is not None
        if self._waiting and self._comm is not group.comm:
            self.run()
        self._groups, self._state, self._comm = groups, state, group.comm
        self._waiting.append((unit, flat_grads))
        group.pending_step = unit.waiting
        self._num_bytes += (
            unit.flat.num_gradient_bytes if flat_grads is None else flat_grads.flat.nbytes
        )
        if self._num_bytes >= self._min_bytes:
            self.run()
        elif len(self._waiting) == 1:
            if is_in_backward():
                queue_backward_callback(self.run)
            else:
                self.run()

    def run(self) -> None:
        """Step all that wait."""
        if any(unit.group is not None and unit.group.has_failed for unit, _ in self._waiting):
            self.abandon()  # whether or not some rank has asked for them before it goes on
        units, self._waiting, self._num_bytes = self._waiting, [], 0
        comm, state = self._comm, self._state
        waiting = [
            (unit, flat_grads, group)
            for unit, flat_grads in units
            if (group := unit.group) is not None
        ]
        for _, _, group in waiting:
            group.pending_step = None
        if not waiting or comm is None:
            return
        is_beside = not comm.waits_block_host
        stream = comm.on_stream(CommStream.OPTIMIZER) if is_beside else contextlib.nullcontext()
        together, apart = [], []
        with stream, torch.no_grad(), profiled("optimizer", waiting[0][2].label):
            for unit, flat_grads, _ in waiting:
                if flat_grads is None or unit.take(flat_grads, state):
                    together.append(unit)
                else:
                    apart.append((unit, flat_grads))
            gradients = [grad for unit in together for grad in unit.flat.gradients]
            if together:
                self._step(together)
            if is_beside:
                comm.hold_until_done(gradients)
                queued = comm.record()
        for unit in together:
            group = unit.group
            if group is not None:
                group.pending_step = QueuedStep(group, queued) if is_beside else None
                group.record_step()
        for unit, flat_grads in apart:
            unit.step_apart(flat_grads, self._groups, state)

    def abandon(self) -> None:
        """Forget all that wait."""
        units, self._waiting, self._num_bytes = self._waiting, [], 0
        for unit, _ in units:
            if unit.group is not None:
                unit.group.pending_step = None
            unit.flat.forget_slices()

    def forget(self) -> None:
        """Hold no flat shard: their memory is about to move."""
        self.run()
        self._joined.clear()

    def _step(self, units: Sequence[Joinable]) -> None:
        parts = [unit.flat.begin_step() for unit in units]
        joined = self._joined.get(units[0])
        if joined is None or joined.parts != parts:
            joined = self._joined[units[0]] = self._join(units, parts)
        for number, own in zip(joined.numbers, joined.unsharded.param_groups, strict=True):
            group = self._groups[number]
            own.update((key, value) for key, value in group.items() if key != "params")
        joined.step(joined.unsharded)
        for unit in units:
            unit.record_stepped(self._state)

    def _join(self, units: Sequence[Joinable], parts: list[Optimizer]) -> _Joined:
        """Return an optimizer that steps all ``parts``, which keep their state."""
        params: dict[int, list[torch.Tensor]] = {}
        for unit, part in zip(units, parts, strict=True):
            for number, own in zip(unit.flat.numbers, part.param_groups, strict=True):
                params.setdefault(unit.numbers[number], []).extend(own["params"])
        numbers = list(params)
        unsharded = parts[0]
        if len(parts) > 1:
            unsharded = self.make([{**self._groups[n], "params": params[n]} for n in numbers])
            unsharded.state = defaultdict(dict)
            for part in parts:
                for flat_slice in chain.from_iterable(own["params"] for own in part.param_groups):
                    unsharded.state[flat_slice] = part.state[flat_slice]
        step: Any = type(unsharded).step
        return _Joined(parts, unsharded, inspect.unwrap(step), numbers)
