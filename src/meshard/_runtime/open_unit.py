"""What happens to a unit while somebody reads and edits its whole parameters?

It is *open*: its modules hold plain parameters in the dtype of the shards (what it computes with
may be narrower, and would round the edits), in memory of their own that nothing else refers to.
Meanwhile its lifecycle is replaced by one that gathers nothing, so the plain path does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from meshard._comm.all_gather import start_all_gather
from meshard._comm.communicator import Lane
from meshard._comm.rooted_communicator import gather_to_first, scatter_from_first
from meshard._comm.setup_communicator import broadcast_from_first
from meshard._comm.slots import matching_parts
from meshard._params.dtensors import is_placed_like, local_of
from meshard._params.sharded_param import ShardedParam
from meshard._runtime.extended_tensors import check_not_extended
from meshard._runtime.group_tensors import GroupTensors, Place
from meshard._runtime.open_events import OpenEvents, Opening, joining_hook_maker
from meshard._runtime.param_group import ParamGroup, Residence
from meshard._runtime.unit import Casts, StepEvents, Unit


class OpenUnit:
    """A unit that is open, until ``close``.

    **Collective:** the shard group; with ``rank0_only`` that of the first replica.

    Args:
        unit: At rest; see ``check_may_open``.
        opening: What was asked for.
    """

    def __init__(self, unit: Unit, opening: Opening) -> None:
        assert unit.group is not None
        self.unit = unit
        self.opening = opening
        assert isinstance(unit.group.tensors, GroupTensors)  # see check_may_open
        self._group: ParamGroup = unit.group
        self._tensors = unit.group.tensors
        self._group.reshard()
        self._version = self._group.version
        self._whole = self._gather()
        self._casts, unit.casts = unit.casts, Casts(None, None)
        events = OpenEvents(unit.lifecycle, opening, is_whole_here=bool(self._whole))
        unit.lifecycle = cast("StepEvents", events)
        self._group.residence = Residence.OPEN
        if self._whole:
            for param, whole in zip(self._group.params, self._whole, strict=True):
                param.show(whole)

    @property
    def place(self) -> Place:
        """Mesh and device."""
        return self._group.place

    # --- whole parameters ------------------------------------------------------------------

    def _gather(self) -> list[nn.Parameter]:
        """Return the whole parameters, or nothing on ranks that are not to have them."""
        group, roles = self._group, self._group.place.roles
        own = self._tensors.storage.buffer.to(group.place.device)
        if self.opening.rank0_only:
            if not _is_in_first_replica(group):
                return []
            rows = gather_to_first(own, roles.shard_group, group.label)
            if rows is None:
                return []
        else:
            with group.comm.lane(Lane.GATHER):
                in_flight = start_all_gather(
                    own,
                    roles.shard_count,
                    comm=group.comm,
                    group=roles.shard_group,
                    label=group.label,
                )
            in_flight.pending.wait()
            rows = in_flight.gathered
            assert rows is not None
        with torch.inference_mode(False), torch.no_grad():
            wholes = [
                torch.empty(param.layout.shape, dtype=param.sharded.dtype, device=own.device)
                for param in group.params
            ]
            for ours, theirs in self._pairs(rows, wholes):
                theirs.copy_(ours)
            return [self._as_parameter(index, whole) for index, whole in enumerate(wholes)]

    def _as_parameter(self, index: int, whole: torch.Tensor) -> nn.Parameter:
        value = whole.cpu() if self.opening.offload_to_cpu else whole
        if not value.is_floating_point():
            return nn.Parameter(value, requires_grad=False)
        # A hook can only be put on a tensor that requires grad.
        parameter = self._group.params[index].as_used(nn.Parameter(value))
        parameter.register_post_accumulate_grad_hook(joining_hook_maker(self.unit)(index))
        parameter.requires_grad_(self._group.params[index].sharded.requires_grad)
        return parameter

    def _pairs(
        self, rows: torch.Tensor, wholes: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over parts of ``rows [shard_count, n]`` and the same elements of the wholes."""
        layout = self._tensors.storage.layout
        for segment, part in zip(layout.segments, layout.split(rows), strict=True):
            for slot in segment.slots:
                slots = part.narrow(1, slot.offset, slot.numel)
                yield from matching_parts(slots, wholes[slot.index], layout.params[slot.index])

    # --- edits -----------------------------------------------------------------------------

    def edited_values(self) -> list[torch.Tensor]:
        """Return what the modules hold now, one value per parameter; nothing if not whole here.

        Raises:
            RuntimeError: That cannot be written back.
        """
        if self._group.version != self._version:
            raise RuntimeError(
                f"the shards of unit {self.unit.label!r} were edited while it was open (by an "
                "optimizer's step?), and writing back would undo that; step outside of "
                "unsharded_params, or pass writeback=False."
            )
        if not self._whole:
            return []
        return [self._value_of(param) for param in self._group.params]

    def _value_of(self, param: ShardedParam) -> torch.Tensor:
        name = f"parameter {param.fqn!r} of unit {self.unit.label!r}"
        held = {id(value): value for value in param.held()}
        if len(held) != 1:
            raise RuntimeError(
                f"{name} is tied, and another tensor was assigned to some of its names only; "
                "assign to all of them, or edit it in place."
            )
        (value,) = held.values()
        if value is None:
            raise RuntimeError(f"{name} was removed inside unsharded_params; edit it in place.")
        if param.placed is not None and is_placed_like(value, param.unsharded):
            return local_of(value.detach())
        if isinstance(value, DTensor) or value.is_meta or value.shape != param.layout.shape:
            raise RuntimeError(
                f"{name} was replaced inside unsharded_params by a {type(value).__name__} of shape "
                f"{tuple(value.shape)} on {value.device}, which cannot be written back; "
                f"assign a plain tensor of shape {tuple(param.layout.shape)}."
            )
        return value.detach()

    def close(self) -> None:
        """Let the modules hold their shards again. Does not communicate."""
        for param in self._group.params:
            # As everywhere, the sharded parameter's flag is the one that counts.
            flags = {value.requires_grad for value in param.held() if value is not None}
            if self._whole and not self.opening.rank0_only and len(flags) == 1:
                param.sharded.requires_grad_(flags.pop())
            param.show(param.sharded)
        self._group.residence = Residence.SHARDED
        self._whole.clear()
        self.unit.casts = self._casts
        if isinstance(self.unit.lifecycle, OpenEvents):  # or it got another root meanwhile
            self.unit.lifecycle = self.unit.lifecycle.root

    @torch.no_grad()
    def write(self, values: list[torch.Tensor]) -> None:
        """Put what ``edited_values`` returned into the shards.

        **Collective:** with ``rank0_only`` the shard group of the first replica; then the replica
        group, whose first rank is the one that counts.
        """
        group, roles = self._group, self._group.place.roles
        storage = self._tensors.storage
        group.finish_copies()
        if not self.opening.rank0_only:
            for param, own, value in zip(group.params, storage.locals, values, strict=True):
                owned = param.layout.owned_rows(roles.shard_rank)
                own.copy_(value.narrow(param.layout.shard_dim, owned.start, len(owned)))
            if roles.replicate_group is None:
                return
        buffer = storage.buffer.to(group.place.device)
        if self.opening.rank0_only and _is_in_first_replica(group):
            rows = self._rows_of(values, buffer) if values else None
            scatter_from_first(buffer, rows, roles.shard_group, group.label)
        if roles.replicate_group is not None:
            broadcast_from_first(buffer, roles.replicate_group, label=group.label)
        if buffer is not storage.buffer:
            storage.buffer.copy_(buffer)
        increment_version(storage.locals)

    def _rows_of(self, values: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """Return the flat shards ``[shard_count, n]`` of all ranks."""
        rows = own.new_zeros(self._group.place.roles.shard_count, own.numel())
        for ours, theirs in self._pairs(rows, values):
            ours.copy_(theirs)
        return rows


def _is_in_first_replica(group: ParamGroup) -> bool:
    replicas = group.place.roles.replicate_group
    return replicas is None or replicas.rank() == 0


def check_may_open(unit: Unit, opening: Opening) -> bool:
    """Return whether a unit is to be opened: not if that has been done, or it has no parameters.

    Raises:
        NotImplementedError: A parameter says itself what is gathered of it.
        RuntimeError: It cannot be opened now, or is open in another way.
    """
    if unit.group is None:
        return False
    if isinstance(unit.lifecycle, OpenEvents):
        unit.lifecycle.opening.check_allows(opening, unit.label)
        return False
    if not unit.lifecycle.is_between_steps():
        raise RuntimeError(
            f"unsharded_params cannot open unit {unit.label!r} while a forward or backward of its "
            "root runs. Before or around the forward it can; to read a weight inside a parent's "
            "forward, pass unshard_on_access=True to fully_shard."
        )
    check_not_extended(unit.group.tensors, "meshard.unsharded_params")
    unit.group.adopt_edits()
    unit.group.tensors.check_materialised()
    return True
