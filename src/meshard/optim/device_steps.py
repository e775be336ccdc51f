"""Steps on the device of units in host memory.

Both are copied there with the gradient, stepped, and copied back. All of it is queued on the
optimizer's lane, one unit after the other, so that what one has taken of the device the next one
gets. Nothing waits in backward; the host does before the unit is gathered again, or read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._comm.communicator import RecordedWork
from meshard._engine.param_group import ParamGroup
from meshard._params.storage import MemoryLocation
from meshard.optim.flat_slices import State
from meshard.optim.joined_steps import MakeOptimizer
from meshard.optim.pending_step import AwaitedStep


class ReturningStep(AwaitedStep):
    """A step whose result is on its way to host memory.

    Args:
        group: Whose step.
        pending: The event that follows the last copy.
    """

    def __init__(self, group: ParamGroup, pending: RecordedWork) -> None:
        super().__init__(group)
        self._pending = pending

    def _wait(self) -> None:
        self._pending.synchronize()


class _Twin(NamedTuple):
    """Stands for an optimizer, with parameters on the device that have memory during a step."""

    of: Optimizer
    optimizer: Optimizer
    step: Callable[[Optimizer], object]


class DeviceSteps:
    """Steps what an optimizer has in host memory.

    Args:
        make: Makes an optimizer of its kind.
        device: Where to step.
        home: The host memory, for states that the first step makes.
    """

    def __init__(self, make: MakeOptimizer, device: torch.device, location: MemoryLocation) -> None:
        self._make = make
        self._device = device
        self._location = location
        self._twin: _Twin | None = None

    def step(self, optimizer: Optimizer) -> None:
        """Step ``optimizer`` by the gradients that its parameters have.

        **Stream:** the current one; the copies back follow on it.

        Args:
            optimizer: One of plain tensors. Its state has the new values when the stream is
                through.
        """
        twin = self._twin
        if twin is None or twin.of is not optimizer:
            twin = self._twin = self._made(optimizer)
        pairs = []
        for group, own in zip(optimizer.param_groups, twin.optimizer.param_groups, strict=True):
            own.update((key, value) for key, value in group.items() if key != "params")
            pairs += list(zip(group["params"], own["params"], strict=True))
        pairs = [(param, copy) for param, copy in pairs if param.grad is not None]
        for param, copy in pairs:
            copy.data = self._fetch(param.detach())
            copy.grad = self._fetch(param.grad)
            known = optimizer.state.get(param, {})
            twin.optimizer.state[copy] = {key: self._fetched(each) for key, each in known.items()}
        twin.step(twin.optimizer)
        for param, copy in pairs:
            param.detach().copy_(copy.detach(), non_blocking=True)
            self._store(twin.optimizer.state.pop(copy, {}), optimizer.state[param])
            copy.grad = None
            copy.data = copy.data.new_empty(0)

    def _made(self, optimizer: Optimizer) -> _Twin:
        groups = []
        for group in optimizer.param_groups:
            copies = [
                nn.Parameter(torch.empty(0, dtype=p.dtype, device=self._device), p.requires_grad)
                for p in group["params"]
            ]
            groups.append({**group, "params": copies})
        made = self._make(groups)
        step: Any = type(made).step
        return _Twin(optimizer, made, inspect.unwrap(step))

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(tensor, device=self._device, pin_memory=False)
        return copy.copy_(tensor, non_blocking=True)

    def _fetched(self, value: Any) -> Any:
        """Return a state on the device; torch counts steps on the host."""
        return self._fetch(value) if isinstance(value, torch.Tensor) and value.dim() else value

    def _store(self, new: State, state: State) -> None:
        for key, value in new.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                state[key] = value
            else:
                if key not in state:
                    state[key] = self._location.empty_like(value)
                state[key].copy_(value, non_blocking=True)
