"""How do neighbouring shards, their gradients and their optimizer state become one tensor each?

The shards of a unit lie in one buffer, and so do their gradients. A **run** is a range of that
buffer which an optimizer treats alike: the same hyperparameters, the same history. One kernel
sequence steps it. For users every parameter has a state of its own, which is a view of the run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._params.dtensors import local_of, locals_of, set_local, wrap_like
from meshard._params.private_torch import unasked
from meshard._params.shard_storage import with_storage_of_its_own

State = dict[str, Any]
_GRADIENT = attrgetter("grad")
_ADDRESS, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


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
        self.states: list[State] = []  # of the members, once they have one
        self._shown: State = {}  # what these are views of
        self._params = [member.param for member in self.members]
        # Of which members this rank owns something, and where that is from the first on, in bytes.
        self._owned = [place for place, member in enumerate(self.members) if member.numel]
        first = self.members[self._owned[0]].offset if self._owned else self._start
        size = self.flat.itemsize
        self._before_owned = (first - self._start) * size
        self._distances = [(self.members[i].offset - first) * size for i in self._owned]

    # --- gradients -------------------------------------------------------------------------

    def take_gradient(self) -> bool:
        """Give ``flat`` the gradients of the members; False if only some members have one."""
        with unasked():
            gradients = list(map(_GRADIENT, self._params))
        missing = sum(map(is_, gradients, repeat(None)))
        if missing:
            self.flat.grad = None
            return missing == len(gradients)
        locals_ = list(locals_of(gradients))
        view = self._view_of(locals_)
        self.flat.grad = self._joined(locals_) if view is None else view
        return True

    def split_by_gradient(self) -> list[Run]:
        """Return runs over the same memory in which all members have a gradient, or none has."""
        return self.split([member.param.grad is not None for member in self.members])

    def _view_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the range in which ``tensors`` lie as the members do; None if they do not."""
        if not self._owned:
            return torch.empty_like(self.flat)
        owned = [tensors[place] for place in self._owned]
        first = owned[0]
        start = first.data_ptr()
        if (
            [address - start for address in map(_ADDRESS, owned)] != self._distances
            or first.dtype != self.flat.dtype
            or not all(map(_IS_CONTIGUOUS, owned))
        ):
            return None
        base = first._base  # as a rule what has been reduced, and as long as the run
        if (
            base is not None
            and base.shape == self.flat.shape
            and base.dtype == first.dtype
            and base.data_ptr() == start - self._before_owned
            and base.is_contiguous()
        ):
            return base
        # What lies at these addresses is of one storage if that of the first reaches so far.
        storage = first.untyped_storage()
        begin = start - storage.data_ptr() - self._before_owned
        if begin < 0 or begin + self._numel * first.itemsize > storage.nbytes():
            return None
        return first.as_strided((self._numel,), (1,), begin // first.itemsize)

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

    def split_by_history(self, states: Sequence[State]) -> list[Run]:
        """Return runs over the same memory whose members have been stepped alike."""
        return self.split([_history(state) for state in states])

    def pull(self, states: list[State]) -> State:
        """Return the state of the run, from those of its members, which become views of it."""
        state: State = {}
        if not states[0]:
            return state
        self.states = states
        for key, value in states[0].items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
            elif value.dim() == 0:
                state[key] = value.clone()
            else:
                state[key] = self._joined([_plain(each[key]) for each in states])
        self.show(state, {})
        return state

    def show(self, state: State, states: Mapping[torch.Tensor, State]) -> None:
        """Show the run's state as that of its members; see ``flat_snapshot`` for what has no dims.

        Args:
            state: Of the run, after a step.
            states: Where those of the members are, or will be.
        """
        if not self.states:
            self.states = [states[member.param] for member in self.members]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                for each in self.states:
                    each[key] = value
            elif value.dim() and self._shown.get(key) is not value:
                self._shown[key] = value
                self._show(key, value)

    def _show(self, key: str, flat: torch.Tensor) -> None:
        for member, each in zip(self.members, self.states, strict=True):
            local = with_storage_of_its_own(self._part(flat, member)).view(
                local_of(member.param).shape
            )
            known = each.get(key)
            if isinstance(known, DTensor):
                set_local(known, local)
            else:
                each[key] = wrap_like(member.param, local)

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
