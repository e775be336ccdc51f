"""Slices of flat shards that an optimizer steps as one tensor.

The shards of a unit lie in one buffer, and so do their gradients. A slice is a range of that buffer
whose parameters have the same hyperparameters and the same history, so that one kernel sequence
steps it. Users see one state per parameter: views of the state of the slice. An edit of a view in
place needs no notice. A replacement does, and is found by comparing identities of objects: these
are thousands of objects in every step, so the loops over them run in C.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._params.storage import with_own_storage
from meshard._torch.dtensor import local_of, plain_of, set_local, wrap_like
from meshard._torch.private import version_of, without_torch_function

State = dict[str, Any]
OptimGroups = Sequence[dict[str, Any]]


class Member(NamedTuple):
    """One parameter of a slice."""

    param: torch.Tensor  # sharded
    offset: int  # of its shard, in elements from the start of the segment
    numel: int  # of its shard, without padding


class FlatSlice:
    """A range of a unit's flat shard with one optimizer state.

    ``members`` are neighbours in ``segment [n]``, the shards of one dtype of a unit. ``number`` is
    the index of their param group in the optimizer.
    """

    def __init__(self, segment: torch.Tensor, members: Sequence[Member], number: int) -> None:
        self.members = list(members)
        self.number = number
        self._segment = segment
        self._start = members[0].offset
        # Members of which this rank owns something; if none, all in between is padding.
        self._owned = [position for position, member in enumerate(members) if member.numel]
        numel = members[-1].offset + members[-1].numel - self._start if self._owned else 0
        self.flat = nn.Parameter(segment.narrow(0, self._start, numel), requires_grad=False)
        self.flat.grad_dtype = None  # any: that of the members
        self.states: list[State] = []  # of the members, once they have one
        self._shown: State = {}  # the state that those of the members are views of
        self._params = [member.param for member in members]
        distances = [(members[i].offset - self._start) * segment.itemsize for i in self._owned]
        self._before_owned = distances[0] if distances else 0  # bytes
        self._distances = [each - self._before_owned for each in distances]  # from the first owned

    def take_gradient(self) -> bool:
        """Set ``flat.grad`` from those of the members; return False if only some have one."""
        with without_torch_function():
            gradients = list(map(attrgetter("grad"), self._params))
        missing = sum(map(is_, gradients, repeat(None)))
        if missing:
            self.flat.grad = None
            return missing == len(gradients)
        locals_ = list(map(local_of, gradients))
        view = self._view_of(locals_)
        self.flat.grad = self._joined(locals_) if view is None else view
        return True

    def _view_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the range in which ``tensors`` lie as the members do; None if they do not."""
        if not self._owned:
            return torch.empty_like(self.flat)
        owned = [tensors[position] for position in self._owned]
        first = owned[0]
        start = first.data_ptr()
        if (
            [address - start for address in map(torch.Tensor.data_ptr, owned)] != self._distances
            or first.dtype != self.flat.dtype
            or not all(map(torch.Tensor.is_contiguous, owned))
        ):
            return None
        # What lies at these addresses is one storage if that of the first reaches so far.
        storage, numel = first.untyped_storage(), self.flat.numel()
        begin = start - storage.data_ptr() - self._before_owned
        if begin < 0 or begin + numel * first.itemsize > storage.nbytes():
            return None
        return first.as_strided((numel,), (1,), begin // first.itemsize)

    def _joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``tensors`` copied next to each other, as the members lie; padding is zero."""
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        flat = torch.zeros(self.flat.numel(), dtype=dtype, device=tensors[0].device)
        for member, tensor in zip(self.members, tensors, strict=True):
            self._range_of(flat, member).copy_(tensor.reshape(-1))
        return flat

    def _range_of(self, flat: torch.Tensor, member: Member) -> torch.Tensor:
        start = member.offset - self._start if member.numel else 0
        return flat.narrow(0, start, member.numel)

    def pull(self, states: list[State]) -> State:
        """Return the state of the slice from those of its members, which become views of it."""
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
                state[key] = self._joined([plain_of(each[key]) for each in states])
        self.show(state, {})
        return state

    def show(self, state: State, states: Mapping[torch.Tensor, State]) -> None:
        """Make ``states`` of members views of ``state``; ``Counters`` shows what has no dims."""
        if not self.states:
            self.states = [states[param] for param in self._params]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                for each in self.states:
                    each[key] = value
            elif value.dim() and self._shown.get(key) is not value:
                self._shown[key] = value
                self._show_views(key, value)

    def _show_views(self, key: str, flat: torch.Tensor) -> None:
        for member, each in zip(self.members, self.states, strict=True):
            view = with_own_storage(self._range_of(flat, member))
            view = view.view(local_of(member.param).shape)
            known = each.get(key)
            if isinstance(known, DTensor):
                set_local(known, view)
            else:
                each[key] = wrap_like(member.param, view)

    def split_by_gradient(self) -> list[FlatSlice]:
        """Return slices of the same memory in which all members have a gradient, or none has."""
        return self._split([param.grad is not None for param in self._params])

    def split_by_history(self, states: Sequence[State]) -> list[FlatSlice]:
        """Return slices of the same memory whose members were stepped alike."""
        return self._split([_history(state) for state in states])

    def _split(self, keys: Sequence[object]) -> list[FlatSlice]:
        return [
            FlatSlice(self._segment, [member for _, member in pairs], self.number)
            for _, pairs in groupby(zip(keys, self.members, strict=True), itemgetter(0))
        ]


def _history(state: State) -> dict[str, object]:
    """Return what must be equal for two parameters to be stepped as one."""
    return {
        key: (value.item() if value.dim() == 0 else ...) if torch.is_tensor(value) else value
        for key, value in state.items()
    }


class Counters:
    """States without dims (``step``), one number per slice and a copy of it for each member.

    An ordinary optimizer adds 1 to each number of a parameter; here the copies follow the slices,
    which are on one device. ``inner`` has the states of the slices.
    """

    def __init__(
        self, key: str, slices: Sequence[FlatSlice], inner: Mapping[torch.Tensor, State]
    ) -> None:
        self._of_slices = torch.stack([inner[each.flat][key] for each in slices])
        device = self._of_slices.device
        counts = torch.tensor([len(each.members) for each in slices], device=device)
        self._positions = torch.arange(len(slices), device=device).repeat_interleave(counts)
        self._expected = self._of_slices.index_select(0, self._positions)
        self._of_members = self._expected.clone()
        # Each with a storage of its own: a checkpoint would save that of all with every one.
        self._shown = [with_own_storage(each) for each in self._of_members.unbind()]
        self._version = sum(map(version_of, self._shown))
        for flat_slice, value in zip(slices, self._of_slices.unbind(), strict=True):
            inner[flat_slice.flat][key] = value
        for state, value in zip(_states_of(slices), self._shown, strict=True):
            state[key] = value

    def follow(self) -> None:
        """Copy the number of each slice to its members."""
        self._expected = self._of_slices.index_select(0, self._positions)
        self._of_members.copy_(self._expected)

    def is_edited(self) -> bool:
        """Whether a user has written to the number of a member."""
        if self._of_members.is_cpu:
            return not torch.equal(self._of_members, self._expected)
        # Reading the values would wait for the device, so edits through ``.data`` are not seen.
        return sum(map(version_of, self._shown)) != self._version


class Snapshot:
    """The objects that a step has left: parameters, their states, and what is in these.

    ``inner`` has the states of the slices, and of parameters that were stepped by themselves.
    """

    def __init__(
        self,
        optim_groups: OptimGroups,
        state: Mapping[torch.Tensor, State],
        slices: Sequence[FlatSlice],
        inner: Mapping[torch.Tensor, State],
    ) -> None:
        having: dict[str, list[FlatSlice]] = {}
        counted: dict[tuple[str, torch.device, torch.dtype], list[FlatSlice]] = {}
        for flat_slice in slices:
            for key, value in inner.get(flat_slice.flat, {}).items():
                having.setdefault(key, []).append(flat_slice)
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    counted.setdefault((key, value.device, value.dtype), []).append(flat_slice)
        self._counters = [Counters(key, each, inner) for (key, _, _), each in counted.items()]
        self._states_by_key = {key: _states_of(each) for key, each in having.items()}
        self._sharded = [member.param for each in slices for member in each.members]
        self._inner = inner
        self._inner_values = self._values_inside()
        self._lengths = [len(group["params"]) for group in optim_groups]
        self._objects = self._find_objects(optim_groups, state)

    def holds(self, optim_groups: OptimGroups, state: Mapping[torch.Tensor, State]) -> bool:
        """Whether groups, parameters and states are the same objects, and no count was edited."""
        return (
            [len(group["params"]) for group in optim_groups] == self._lengths
            and _are_same(self._find_objects(optim_groups, state), self._objects)
            and not any(counters.is_edited() for counters in self._counters)
        )

    def follow(self) -> bool:
        """Update the counts of steps; return False if the step has replaced states of slices."""
        if not _are_same(self._values_inside(), self._inner_values):
            return False
        for counters in self._counters:
            counters.follow()
        return True

    def _find_objects(
        self, optim_groups: OptimGroups, state: Mapping[torch.Tensor, State]
    ) -> list[object]:
        """Return everything that a user may replace."""
        params = list(chain.from_iterable(map(itemgetter("params"), optim_groups)))
        values = [
            value
            for key, states in self._states_by_key.items()
            for value in map(dict.get, states, repeat(key))
        ]
        views = [value for value in values if type(value) is DTensor]
        locals_ = map(local_of, chain(self._sharded, views))
        return [*params, *map(state.get, params), *values, *locals_]

    def _values_inside(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._inner.values())))


def _are_same(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _states_of(slices: Iterable[FlatSlice]) -> list[State]:
    return [state for flat_slice in slices for state in flat_slice.states]
