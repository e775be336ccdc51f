"""Slices of flat shards that an optimizer steps as one tensor.

The shards of a unit lie in one buffer, and so do their gradients. A slice is a range of that buffer
whose parameters have the same hyperparameters and the same history, so that one kernel sequence
steps all of them. The optimizer state of a slice is flat too: one tensor per key, of which users
see views.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._params.storage import with_own_storage
from meshard._torch.dtensor import (
    are_placed_like,
    is_placed_like,
    local_of,
    plain_of,
    set_local,
    wrap_like,
)
from meshard._torch.private import without_torch_function

State = dict[str, Any]
States = MutableMapping[torch.Tensor, State]
# The tensors that held the flat state of slices until users read ``state``, which cuts it up by
# parameter. The keys are (address, number of elements). By its key the next step finds unchanged
# state again, and need not copy it.
ExposedMemory = Mapping[tuple[int, int], torch.Tensor]


class Member(NamedTuple):
    """One parameter of a slice."""

    param: torch.Tensor  # sharded
    offset: int  # of its shard, in elements from the start of the segment
    numel: int  # of its shard, without padding


class FlatSlice:
    """A range of a unit's flat shard with one optimizer state.

    ``segment [n]`` has all shards of one dtype of a unit, and ``members`` are neighbours in it.
    ``number`` is the index of their param group in the optimizer.
    """

    def __init__(self, segment: torch.Tensor, members: Sequence[Member], number: int) -> None:
        self.number = number
        self.params = [member.param for member in members]
        self._members = members
        # Positions of the members of which this rank owns elements; none if it owns padding only.
        self._owned = [position for position, member in enumerate(members) if member.numel]
        offsets = [members[position].offset for position in self._owned] or [0]
        self._start = offsets[0]
        # The offset of each of these members from the first of them, in bytes.
        self._distances = [(offset - offsets[0]) * segment.itemsize for offset in offsets]
        numel = offsets[-1] - offsets[0] + members[self._owned[-1]].numel if self._owned else 0
        self.flat = nn.Parameter(segment.narrow(0, self._start, numel), requires_grad=False)
        self.flat.grad_dtype = None  # None: gradients of any dtype are accepted

    def take_gradient(self) -> list[torch.Tensor]:
        """Set ``flat.grad`` from the gradients of the members, or to None if one has no gradient.

        Return the members without a gradient; but an empty list if no member has one, because then
        the slice as a whole is not stepped.
        """
        with without_torch_function():
            gradients = list(map(attrgetter("grad"), self.params))
        if any(map(is_, gradients, repeat(None))):
            self.flat.grad = None
            pairs = zip(self.params, gradients, strict=True)
            lacking = [param for param, gradient in pairs if gradient is None]
            return lacking if len(lacking) < len(gradients) else []
        if not are_placed_like(gradients, self.params):
            param, gradient = next(
                pair
                for pair in zip(self.params, gradients, strict=True)
                if not is_placed_like(*pair)
            )
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is {_spoken(gradient)},"
                f" and the parameter is {_spoken(param)}; make .grad a DTensor like the parameter."
            )
        self.flat.grad = self._joined(list(map(local_of, gradients)), {})
        return []

    def take_state(self, states: States, exposed: ExposedMemory) -> State:
        """Return a state for the slice, joined from ``states`` of its members.

        The tensors in ``states``, but for scalars, become views of the returned state.
        """
        given = [states.get(param, {}) for param in self.params]
        own: State = {}
        for key, value in given[0].items():
            if not isinstance(value, torch.Tensor):
                continue  # a user's own entry: torch's optimizers keep tensors only
            if value.dim() == 0:
                own[key] = value.clone()
            else:
                own[key] = self._joined([plain_of(each[key]) for each in given], exposed)
        self.expose(own, states)
        return own

    def expose(self, own: State, states: States) -> None:
        """Set ``states`` of the members to views of ``own``, the state of the slice."""
        for member in self._members if own else ():
            state = states.setdefault(member.param, {})
            for key, value in own.items():
                if not isinstance(value, torch.Tensor):
                    state[key] = value
                elif value.dim() == 0:
                    state[key] = value.clone()
                else:
                    self._expose_view(state, key, value, member)

    def _expose_view(self, state: State, key: str, value: torch.Tensor, member: Member) -> None:
        view = with_own_storage(self._range_of(value, member)).view(local_of(member.param).shape)
        known = state.get(key)
        if isinstance(known, DTensor) and known.dtype == view.dtype:
            set_local(known, view)  # updates the tensor that a user may have read before
        else:
            state[key] = wrap_like(member.param, view)

    def _joined(self, tensors: Sequence[torch.Tensor], exposed: ExposedMemory) -> torch.Tensor:
        """Return ``tensors``, one for each member, as one tensor with the layout of the slice.

        If they have that layout in memory already, the result is a view of that memory. Otherwise
        it is a copy, with zeros as padding.
        """
        view = self._view_of(tensors, exposed)
        if view is not None:
            return view
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        flat = torch.zeros(self.flat.numel(), dtype=dtype, device=tensors[0].device)
        for member, tensor in zip(self._members, tensors, strict=True):
            self._range_of(flat, member).copy_(tensor.reshape(-1))
        return flat

    def _view_of(
        self, tensors: Sequence[torch.Tensor], exposed: ExposedMemory
    ) -> torch.Tensor | None:
        """Return the memory of ``tensors`` as one tensor; None if it has another layout."""
        if not self._owned:
            return torch.empty_like(self.flat)
        owned = [tensors[position] for position in self._owned]
        first, numel = owned[0], self.flat.numel()
        start = first.data_ptr()
        if (
            [address - start for address in map(torch.Tensor.data_ptr, owned)] != self._distances
            or first.dtype != self.flat.dtype
            or not all(map(torch.Tensor.is_contiguous, owned))
        ):
            return None
        # The distances fit, but these are views of one tensor only if one storage covers all of
        # them. The storage of an exposed state covers no more than that state
        # (``with_own_storage``). So look in ``exposed`` for the flat tensor of which it is a part.
        whole = exposed.get((start, numel), first)
        storage = whole.untyped_storage()
        begin = start - storage.data_ptr()
        if begin + numel * first.itemsize > storage.nbytes():
            return None
        return whole.as_strided((numel,), (1,), begin // first.itemsize)

    def _range_of(self, flat: torch.Tensor, member: Member) -> torch.Tensor:
        return flat.narrow(0, member.offset - self._start if member.numel else 0, member.numel)


def _spoken(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "an ordinary tensor"
    return f"a DTensor with placements {tensor.placements} on {tensor.device_mesh}"


def history_of(state: State) -> dict[str, object]:
    """Return what must be equal for two parameters to be stepped as one: keys and step counts."""
    return {
        key: value.item() if value.dim() == 0 else ...
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
