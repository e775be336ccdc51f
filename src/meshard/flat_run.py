"""How do neighbouring shards, their gradients and their optimizer state become one tensor each?

The shards of a unit lie in one buffer, and so do their gradients. A **run** is a range of that
buffer which an optimizer treats alike: the same hyperparameters, the same history. One kernel
sequence steps it. For users every parameter has a state of its own, which is a view of the run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._params.dtensors import local_of, set_local, wrap_like
from meshard._params.shard_storage import with_storage_of_its_own

State = dict[str, Any]


class Member(NamedTuple):
    """One parameter of a run."""

    param: torch.Tensor  # the sharded parameter
    offset: int  # of its shard, in elements from the start of the segment
    numel: int  # of its shard, without padding


class Run:
    """A range of a unit's flat shard, with one state for all of it.

    Args:
        segment: ``[n]``, the shards of one dtype of a unit.
        members: The parameters of the run, neighbours in ``segment``, in its order.
        number: Of the param group they are in.
    """

    def __init__(self, segment: torch.Tensor, members: Sequence[Member], number: int) -> None:
        self.members = list(members)
        self.number = number
        self._segment = segment
        self._start = members[0].offset
        self._numel = 0  # a rank may own nothing of any of them: what is between is padding
        if any(member.numel for member in members):
            self._numel = members[-1].offset + members[-1].numel - self._start
        whole = segment.narrow(0, self._start, self._numel)
        self.flat = nn.Parameter(whole, requires_grad=False)
        self._states: list[State] = []  # of the members, once they have one
        self._shown: State = {}  # what these are views of
        self._views: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # with their locals
        # Of every state of zero dims, one per member: an ordinary optimizer adds 1 to each.
        self._counters: dict[str, torch.Tensor] = {}
        self._owns: dict[str, list[torch.Tensor]] = {}  # what the members have of these
        self._versions: dict[str, int] = {}  # of these, after our own edits

    # --- gradients -------------------------------------------------------------------------

    def take_gradient(self) -> bool:
        """Give ``flat`` the gradients of the members; False if only some members have one."""
        gradients = [local_of(g) for m in self.members if (g := m.param.grad) is not None]
        if not gradients:
            self.flat.grad = None
            return True
        if len(gradients) < len(self.members):
            return False
        view = self._view_of(gradients)
        self.flat.grad = self._joined(gradients) if view is None else view
        return True

    def split_by_gradient(self) -> list[Run]:
        """Return runs over the same memory in which all members have a gradient, or none has."""
        return self.split([member.param.grad is not None for member in self.members])

    def _view_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the range in which ``tensors`` lie as the members do; None if they do not."""
        if not self._numel:
            return torch.empty_like(self.flat)
        size, dtype, first, start = self.flat.element_size(), self.flat.dtype, None, 0
        for member, tensor in zip(self.members, tensors, strict=True):
            if not member.numel:
                continue
            if first is None:
                first = tensor
                start = tensor.data_ptr() - (member.offset - self._start) * size
            if (
                tensor.data_ptr() != start + (member.offset - self._start) * size
                or tensor.dtype != dtype
                or not tensor.is_contiguous()
            ):
                return None
        assert first is not None
        # What lies at these addresses is of one storage if that of the first reaches so far.
        storage = first.untyped_storage()
        begin = start - storage.data_ptr()
        if begin < 0 or begin + self._numel * size > storage.nbytes():
            return None
        return first.as_strided((self._numel,), (1,), begin // size)

    def _joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``tensors`` copied next to each other, as the members lie; padding is zero."""
        flat = torch.zeros(self._numel, dtype=tensors[0].dtype, device=tensors[0].device)
        for member, tensor in zip(self.members, tensors, strict=True):
            self._part(flat, member).copy_(tensor.reshape(-1))
        return flat

    def _part(self, flat: torch.Tensor, member: Member) -> torch.Tensor:
        """Return what a member has of a tensor of the whole run."""
        start = member.offset - self._start if member.numel else 0
        return flat.narrow(0, start, member.numel)

    # --- state -----------------------------------------------------------------------------

    def is_shown_in(self, states: Mapping[torch.Tensor, State]) -> bool:
        """Whether the members' states are still what they were made: nothing replaced or moved."""
        if not self._states:
            return not any(states.get(member.param) for member in self.members)
        for member, state in zip(self.members, self._states, strict=True):
            if states.get(member.param) is not state:
                return False
        for key, views in self._views.items():
            for state, (view, local) in zip(self._states, views, strict=True):
                if state.get(key) is not view or local_of(view) is not local:
                    return False
        for key, counters in self._counters.items():
            if counters._version != self._versions[key]:
                return False  # one was edited in place
            for state, own in zip(self._states, self._owns[key], strict=True):
                if state.get(key) is not own:
                    return False
        return True

    def split_by_history(self, states: Sequence[State]) -> list[Run]:
        """Return runs over the same memory whose members have been stepped alike."""
        return self.split([_history(state) for state in states])

    def pull(self, states: list[State]) -> State:
        """Return the state of the run, from those of its members, which become views of it."""
        state: State = {}
        if not states[0]:
            return state
        self._states = states
        for key, value in states[0].items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
            elif value.dim() == 0:
                state[key] = value.clone()
            else:
                state[key] = self._joined([_plain(each[key]) for each in states])
        self.push(state, {})
        return state

    def push(self, state: State, states: Mapping[torch.Tensor, State]) -> None:
        """Show what the run's state is after a step as that of its members.

        Args:
            state: Of the run.
            states: Where those of the members are, or will be.
        """
        if not self._states:
            self._states = [states[member.param] for member in self.members]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                for each in self._states:
                    each[key] = value
            elif value.dim() == 0:
                self._count(key, value)
            elif self._shown.get(key) is not value:
                self._shown[key] = value
                self._show(key, value)

    def _count(self, key: str, value: torch.Tensor) -> None:
        if key not in self._counters:
            self._counters[key] = value.expand(len(self._states)).clone()
            self._owns[key] = list(self._counters[key].unbind())
            for each, own in zip(self._states, self._owns[key], strict=True):
                each[key] = own
        self._counters[key].copy_(value)
        self._versions[key] = self._counters[key]._version

    def _show(self, key: str, flat: torch.Tensor) -> None:
        self._views[key] = []
        for member, each in zip(self.members, self._states, strict=True):
            local = with_storage_of_its_own(self._part(flat, member)).view(
                local_of(member.param).shape
            )
            known = each.get(key)
            if isinstance(known, DTensor):
                set_local(known, local)
            else:
                each[key] = known = wrap_like(member.param, local)
            self._views[key].append((known, local))

    def split(self, keys: Sequence[object]) -> list[Run]:
        """Return runs over the same memory, one for each range of members with equal ``keys``."""
        runs, first = [], 0
        for place in range(1, len(self.members) + 1):
            if place == len(self.members) or keys[place] != keys[first]:
                runs.append(Run(self._segment, self.members[first:place], self.number))
                first = place
        return runs


def _history(state: State) -> tuple[object, ...]:
    """Return what must be equal for two parameters to be stepped as one."""
    return tuple(
        (key, value.item() if value.dim() == 0 else ...)
        if isinstance(value, torch.Tensor)
        else (key, value)
        for key, value in sorted(state.items())
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor
