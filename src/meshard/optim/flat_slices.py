"""Slices of flat shards that an optimizer steps as one.

The shards of a unit lie in one buffer, and so do their gradients. A **run** is a range of that
buffer which an optimizer treats alike: the same hyperparameters, the same history. One kernel
sequence steps it. For users every parameter has a state of its own, which is a view of the run's.

What users see as the state of a parameter is a view of that of its run, so edits in place need no
notice. What is replaced does. That is thousands of objects to look at in every step, so they are
compared by identity, in loops that run in C.

As a rule as the shards do, in one piece for each run. Then an optimizer can step by them without a
gradient for every single parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.gradient_buffer import FlatGradients
from meshard._engine.param_group import ParamGroup
from meshard._params.storage import with_own_storage
from meshard._torch.dtensor import local_of, locals_of, set_local, wrap_like
from meshard._torch.private import without_torch_function

State = dict[str, Any]
_GRADIENT = attrgetter("grad")
_ADDRESS, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


class Member(NamedTuple):
    """One parameter of a run."""

    param: torch.Tensor  # the sharded parameter
    offset: int  # of its shard, in elements from the start of the segment
    numel: int  # of its shard, without padding


class FlatSlice:
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
        unsharded = segment.narrow(0, self._start, self._numel)
        self.flat = nn.Parameter(unsharded, requires_grad=False)
        self.states: list[State] = []  # of the members, once they have one
        self._shown: State = {}  # what these are views of
        self._params = [member.param for member in self.members]
        # Of which members this rank owns something, and where that is from the first on, in bytes.
        self._owned = [position for position, member in enumerate(self.members) if member.numel]
        first = self.members[self._owned[0]].offset if self._owned else self._start
        size = self.flat.itemsize
        self._before_owned = (first - self._start) * size
        self._distances = [(self.members[i].offset - first) * size for i in self._owned]

    # --- gradients -------------------------------------------------------------------------

    def take_gradient(self) -> bool:
        """Give ``flat`` the gradients of the members; False if only some members have one."""
        with without_torch_function():
            gradients = list(map(_GRADIENT, self._params))
        missing = sum(map(is_, gradients, repeat(None)))
        if missing:
            self.flat.grad = None
            return missing == len(gradients)
        locals_ = list(locals_of(gradients))
        view = self._view_of(locals_)
        self.flat.grad = self._joined(locals_) if view is None else view
        return True

    def split_by_gradient(self) -> list[FlatSlice]:
        """Return runs over the same memory in which all members have a gradient, or none has."""
        return self.split([member.param.grad is not None for member in self.members])

    def _view_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the range in which ``tensors`` lie as the members do; None if they do not."""
        if not self._owned:
            return torch.empty_like(self.flat)
        owned = [tensors[position] for position in self._owned]
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

    def split_by_history(self, states: Sequence[State]) -> list[FlatSlice]:
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
            local = with_own_storage(self._part(flat, member)).view(local_of(member.param).shape)
            known = each.get(key)
            if isinstance(known, DTensor):
                set_local(known, local)
            else:
                each[key] = wrap_like(member.param, local)

    def split(self, keys: Sequence[object]) -> list[FlatSlice]:
        """Return runs over the same memory, one for each range of members with equal ``keys``."""
        slices, first = [], 0
        for position in range(1, len(self.members) + 1):
            if position == len(self.members) or keys[position] != keys[first]:
                slices.append(FlatSlice(self._segment, self.members[first:position], self.number))
                first = position
        return slices


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


_VERSION = attrgetter("_version")
_PARAMS = itemgetter("params")
Groups = Sequence[dict[str, Any]]


class Counters:
    """What the members of runs have of a state without dims: each a number of its own.

    An ordinary optimizer adds 1 to each of them; here they follow those of the runs.

    Args:
        of_slices: One number per run, on one device.
        runs: As many.
    """

    def __init__(self, of_slices: Sequence[torch.Tensor], slices: Sequence[FlatSlice]) -> None:
        self._of_slices = torch.stack(list(of_slices))
        self.of_slices = list(self._of_slices.unbind())
        device = self._of_slices.device
        sizes = torch.tensor([len(flat_slice.members) for flat_slice in slices], device=device)
        self._places = torch.arange(len(slices), device=device).repeat_interleave(sizes)
        self._expected = self._of_slices.index_select(0, self._places)
        self._values = self._expected.clone()
        self.of_members = [with_own_storage(each) for each in self._values.unbind()]
        self._version: int = sum(map(_VERSION, self.of_members))

    def follow(self) -> None:
        """Give every member the number that its run has now."""
        self._expected = self._of_slices.index_select(0, self._places)
        self._values.copy_(self._expected)

    def is_edited(self) -> bool:
        """Whether users have written to one."""
        if self._values.is_cpu:
            return not torch.equal(self._values, self._expected)
        # To read them would wait for the device. So an edit by ``.data`` is not seen there.
        version: int = sum(map(_VERSION, self.of_members))
        return version != self._version


class _Entries(NamedTuple):
    """The state of several parameters under one key."""

    key: str
    states: list[State]
    values: list[Any]


class Snapshot:
    """What a step has left: which objects, not which values.

    Args:
        groups: The param groups.
        state: Of all their parameters, and maybe of others.
        runs: What was stepped as one.
        inner: The state of the runs, and of what was stepped by itself.
    """

    def __init__(
        self,
        groups: Groups,
        state: Mapping[torch.Tensor, State],
        slices: Sequence[FlatSlice],
        inner: Mapping[torch.Tensor, State],
    ) -> None:
        self._groups = [list(group["params"]) for group in groups]
        self._states = list(map(state.get, chain.from_iterable(self._groups)))
        self._sharded = [member.param for flat_slice in slices for member in flat_slice.members]
        self._locals = list(locals_of(self._sharded))
        self._inner = inner
        self._counters = _count(slices, inner)
        self._inner_values = self._values_inside()
        self._entries = _entries_of(slices, inner)
        views = [value for each in self._entries for value in each.values]
        self._views = [view for view in views if isinstance(view, torch.Tensor) and view.dim()]
        self._shown = [local_of(view) for view in self._views]

    def holds(self, groups: Groups, state: Mapping[torch.Tensor, State]) -> bool:
        """Whether param groups, parameters and their states are what they were."""
        return (
            len(groups) == len(self._groups)
            and all(map(_are_same, map(_PARAMS, groups), self._groups))
            and all(map(is_, map(state.get, chain.from_iterable(self._groups)), self._states))
            and all(map(is_, locals_of(self._sharded), self._locals))
            and all(map(_are_as_shown, self._entries))
            and all(map(is_, locals_of(self._views), self._shown))
            and not any(counters.is_edited() for counters in self._counters)
        )

    def holds_params(self) -> bool:
        """Whether the parameters are what they were; of a state that nobody has seen."""
        return all(map(is_, locals_of(self._sharded), self._locals))

    def was_stepped_in_place(self) -> bool:
        """Whether the state of the runs is what it was, with other values."""
        return _are_same(self._values_inside(), self._inner_values)

    def _values_inside(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._inner.values())))

    def follow(self) -> None:
        """Let every parameter count as its run has."""
        for counters in self._counters:
            counters.follow()


def _are_same(found: Collection[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _are_as_shown(entries: _Entries) -> bool:
    try:
        return all(map(is_, map(itemgetter(entries.key), entries.states), entries.values))
    except KeyError:
        return False


def _states_of(slices: Iterable[FlatSlice]) -> list[State]:
    return [state for flat_slice in slices for state in flat_slice.states]


def _count(slices: Sequence[FlatSlice], inner: Mapping[torch.Tensor, State]) -> list[Counters]:
    """Show every member of ``slices`` counters of its own."""
    alike: dict[tuple[str, torch.device, torch.dtype], list[FlatSlice]] = {}
    for flat_slice in slices:
        for key, value in inner.get(flat_slice.flat, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                alike.setdefault((key, value.device, value.dtype), []).append(flat_slice)
    made = []
    for (key, _, _), counted in alike.items():
        counters = Counters([inner[flat_slice.flat][key] for flat_slice in counted], counted)
        for flat_slice, value in zip(counted, counters.of_slices, strict=True):
            inner[flat_slice.flat][key] = value
        for state, value in zip(_states_of(counted), counters.of_members, strict=True):
            state[key] = value
        made.append(counters)
    return made


def _entries_of(slices: Sequence[FlatSlice], inner: Mapping[torch.Tensor, State]) -> list[_Entries]:
    having: dict[str, list[FlatSlice]] = {}
    for flat_slice in slices:
        for key in inner.get(flat_slice.flat, {}):
            having.setdefault(key, []).append(flat_slice)
    entries = []
    for key, each in having.items():
        states = _states_of(each)
        entries.append(_Entries(key, states, [state[key] for state in states]))
    return entries


class Places:
    """Where each of some runs finds its gradient, for one layout and one set of used parameters.

    Args:
        runs: Which.
        held: Gradients in that layout.
        group: Of the unit that they are of.
    """

    def __init__(
        self, slices: Sequence[FlatSlice], flat_grads: FlatGradients, group: ParamGroup
    ) -> None:
        self._layout, self._used = flat_grads.layout, flat_grads.used
        self._slices = slices
        self._shards = group.tensors.layout
        self._starts = _find(slices, flat_grads, group)
        self._is_all = len(slices) == 1 and slices[0].flat.shape == flat_grads.flat.shape
        pairs = zip(slices, self._starts or (), strict=False)
        self.num_bytes = sum(
            flat_slice.flat.nbytes for flat_slice, start in pairs if start is not None
        )

    def are_of(
        self, slices: Sequence[FlatSlice], flat_grads: FlatGradients, group: ParamGroup
    ) -> bool:
        """Whether this was made for these: no shard has moved since, or was replaced."""
        return (
            self._layout is flat_grads.layout
            and self._slices is slices
            and self._shards is group.tensors.layout
            and self._used == flat_grads.used
        )

    def give(self, flat: torch.Tensor) -> bool:
        """Give every run its gradient, if it has one; False if there are others than of runs.

        Args:
            flat: ``[shard_numel]``, all gradients.
        """
        if self._starts is None:
            return False
        for flat_slice, start in zip(self._slices, self._starts, strict=True):
            if start is None:
                flat_slice.flat.grad = None
            else:
                flat_slice.flat.grad = (
                    flat if self._is_all else flat.narrow(0, start, flat_slice.flat.numel())
                )
        return True


def _find(
    slices: Sequence[FlatSlice], flat_grads: FlatGradients, group: ParamGroup
) -> list[int | None] | None:
    """Return where each run begins, None if it has no gradient; None if one does not lie there."""
    ranges = flat_grads.layout.ranges
    offsets = {id(group.params[index].sharded): ranges[index].offset for index in flat_grads.used}
    starts: list[int | None] = []
    for flat_slice in slices:
        found = [offsets.pop(id(member.param), None) for member in flat_slice.members]
        first = found[0]
        if first is None:
            if any(offset is not None for offset in found):
                return None
        elif found != [
            member.offset - flat_slice.members[0].offset + first for member in flat_slice.members
        ]:
            return None
        starts.append(first)
    return None if offsets else starts
