"""Unsharded weights, to read and to edit.

Its modules run as they are, like plain ones: nothing is gathered or given back. Gradients of whole
parameters join those that the unit gets in the ordinary way.

It is *open*: its modules hold plain parameters in the dtype of the shards (what it computes with
may be narrower, and would round the edits), in memory of their own that nothing else refers to.
Meanwhile its lifecycle is replaced by one that gathers nothing, so the plain path does not know.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from meshard._comm.all_gather import start_all_gather
from meshard._comm.blocking import (
    agree_on_max,
    broadcast_from_first,
    gather_to_first,
    scatter_from_first,
)
from meshard._comm.buffers import matching_parts
from meshard._comm.communicator import CommStream
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.param_group import ParamGroup
from meshard._engine.schedule import ForwardCall, ForwardPass
from meshard._engine.unit import Casts, Unit, units_in, units_of
from meshard._params.flat_params import FlatParams, GradientHook, GroupSpec
from meshard._params.sharded_param import ShardedParam
from meshard._params.subclass_params import check_not_subclass
from meshard._torch.dtensor import is_placed_like, local_of


@dataclass(frozen=True, slots=True)
class SummonOptions:
    """How units are opened: the arguments of ``meshard.unsharded_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False

    def check_allows(self, inner: SummonOptions, label: str) -> None:
        """Raise unless what ``inner`` asks for is so while ``self`` is in force."""
        if (inner.rank0_only, inner.offload_to_cpu) != (self.rank0_only, self.offload_to_cpu):
            raise RuntimeError(
                f"unit {label!r} is open already, with other arguments ({self}); "
                "use the same rank0_only and offload_to_cpu, or leave the outer context first."
            )
        if inner.writeback and not self.writeback:
            raise RuntimeError(
                f"unit {label!r} is open already, and by writeback=False its edits will be "
                "dropped; pass writeback=False here too, or writeback=True to the outer context."
            )


class SummonedLifecycle:
    """Stands in for the lifecycle of a unit while it is open: all that differs is here.

    Args:
        root: The lifecycle of the root, which goes on for other units.
        opening: What was asked for.
        has_unsharded: Whether this rank has the whole parameters.
    """

    def __init__(self, root: Lifecycle, options: SummonOptions, *, has_unsharded: bool) -> None:
        self.root = root
        self.options = options
        self._has_unsharded = has_unsharded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.root, name)

    @property
    def is_last_backward(self) -> bool:
        """Of the root, as it is set."""
        return self.root.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self.root.is_last_backward = value

    def is_running(self, unit: Unit) -> bool:
        """Not as a unit."""
        return False

    def pre_forward(self, unit: Unit) -> None:
        """Let it run, if its parameters are whole here."""
        if not self._has_unsharded:
            raise RuntimeError(
                f"unit {unit.label!r} is open on rank 0 only, so it cannot run on this rank; leave "
                "unsharded_params(..., rank0_only=True) before the forward."
            )

    def post_forward(self, unit: Unit, module_position: int, *, failed: bool) -> ForwardCall | None:
        """Nothing to give back."""
        return None

    def pre_backward(
        self, unit: Unit, of: ForwardPass, call: ForwardCall, gradient: torch.Tensor
    ) -> None:
        """Refuse: what this backward needs has been given back."""
        raise RuntimeError(
            f"a backward reached unit {unit.label!r} inside unsharded_params, from a forward made "
            "before it; run that backward before, or after."
        )


def joining_hook_maker(unit: Unit) -> Callable[[int], GradientHook]:
    """Return what makes the hook that hands the gradient of a whole parameter to its unit."""
    unit_ref = weakref.ref(unit)

    def make(index: int) -> GradientHook:
        return partial(_join, unit_ref, index)

    return make


def _join(unit_ref: weakref.ref[Unit], index: int, unsharded: torch.Tensor) -> None:
    unit, gradient = unit_ref(), unsharded.grad
    unsharded.grad = None
    if unit is None or unit.group is None or gradient is None:
        return
    unit.lifecycle.gradient_joins(unit)  # first: it may clean up after an interrupted step
    unsharded_param = unit.group.params[index].unsharded
    moved = gradient.to(unsharded_param.device, unsharded_param.dtype)
    unsharded_param.grad = moved if unsharded_param.grad is None else unsharded_param.grad + moved


class SummonedUnit:
    """A unit that is open, until ``close``.

    **Collective:** the shard group; with ``rank0_only`` that of the first replica.

    Args:
        unit: At rest; see ``check_may_summon``.
        opening: What was asked for.
    """

    def __init__(self, unit: Unit, options: SummonOptions) -> None:
        assert unit.group is not None
        self.unit = unit
        self.options = options
        assert isinstance(unit.group.tensors, FlatParams)  # see check_may_summon
        self._group: ParamGroup = unit.group
        self._tensors = unit.group.tensors
        self._group.reshard()
        self._version = self._group.version
        self._unsharded = self._gather()
        self._casts, unit.casts = unit.casts, Casts(None, None)
        events = SummonedLifecycle(unit.lifecycle, options, has_unsharded=bool(self._unsharded))
        unit.lifecycle = cast("Lifecycle", events)
        self._group.summon()
        if self._unsharded:
            for param, unsharded in zip(self._group.params, self._unsharded, strict=True):
                param.install(unsharded)

    @property
    def spec(self) -> GroupSpec:
        """Mesh and device."""
        return self._group.spec

    # --- whole parameters ------------------------------------------------------------------

    def _gather(self) -> list[nn.Parameter]:
        """Return the whole parameters, or nothing on ranks that are not to have them."""
        group, mesh_info = self._group, self._group.spec.mesh_info
        own = self._tensors.storage.buffer.to(group.spec.device)
        if self.options.rank0_only:
            if not _is_in_first_replica(group):
                return []
            rows = gather_to_first(own, mesh_info.shard_group, group.label)
            if rows is None:
                return []
        else:
            with group.comm.on_stream(CommStream.GATHER):
                in_flight = start_all_gather(
                    own,
                    mesh_info.shard_count,
                    comm=group.comm,
                    group=mesh_info.shard_group,
                    label=group.label,
                )
            in_flight.pending.wait()
            rows = in_flight.gathered
            assert rows is not None
        with torch.inference_mode(False), torch.no_grad():
            all_unsharded = [
                torch.empty(param.layout.shape, dtype=param.sharded.dtype, device=own.device)
                for param in group.params
            ]
            for ours, theirs in self._pairs(rows, all_unsharded):
                theirs.copy_(ours)
            return [
                self._as_parameter(index, unsharded)
                for index, unsharded in enumerate(all_unsharded)
            ]

    def _as_parameter(self, index: int, unsharded: torch.Tensor) -> nn.Parameter:
        value = unsharded.cpu() if self.options.offload_to_cpu else unsharded
        if not value.is_floating_point():
            return nn.Parameter(value, requires_grad=False)
        # A hook can only be put on a tensor that requires grad.
        parameter = self._group.params[index].as_used(nn.Parameter(value))
        parameter.register_post_accumulate_grad_hook(joining_hook_maker(self.unit)(index))
        parameter.requires_grad_(self._group.params[index].sharded.requires_grad)
        return parameter

    def _pairs(
        self, rows: torch.Tensor, all_unsharded: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over parts of ``rows [shard_count, n]`` and the same elements of the wholes."""
        layout = self._tensors.storage.layout
        for segment, part in zip(layout.segments, layout.split(rows), strict=True):
            for param_range in segment.ranges:
                ranges = part.narrow(1, param_range.offset, param_range.numel)
                yield from matching_parts(
                    ranges, all_unsharded[param_range.index], layout.params[param_range.index]
                )

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
        if not self._unsharded:
            return []
        return [self._value_of(param) for param in self._group.params]

    def _value_of(self, param: ShardedParam) -> torch.Tensor:
        name = f"parameter {param.fqn!r} of unit {self.unit.label!r}"
        installed = {id(value): value for value in param.installed()}
        if len(installed) != 1:
            raise RuntimeError(
                f"{name} is tied, and another tensor was assigned to some of its names only; "
                "assign to all of them, or edit it in place."
            )
        (value,) = installed.values()
        if value is None:
            raise RuntimeError(f"{name} was removed inside unsharded_params; edit it in place.")
        if param.dtensor_placement is not None and is_placed_like(value, param.unsharded):
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
            flags = {value.requires_grad for value in param.installed() if value is not None}
            if self._unsharded and not self.options.rank0_only and len(flags) == 1:
                param.sharded.requires_grad_(flags.pop())
            param.install(param.sharded)
        self._group.dismiss()
        self._unsharded.clear()
        self.unit.casts = self._casts
        if isinstance(self.unit.lifecycle, SummonedLifecycle):  # or it got another root meanwhile
            self.unit.lifecycle = self.unit.lifecycle.root

    @torch.no_grad()
    def write(self, values: list[torch.Tensor]) -> None:
        """Put what ``edited_values`` returned into the shards.

        **Collective:** with ``rank0_only`` the shard group of the first replica; then the replica
        group, whose first rank is the one that counts.
        """
        group, mesh_info = self._group, self._group.spec.mesh_info
        storage = self._tensors.storage
        group.finish_copies()
        if not self.options.rank0_only:
            for param, own, value in zip(group.params, storage.locals, values, strict=True):
                owned = param.layout.owned_rows(mesh_info.shard_rank)
                own.copy_(value.narrow(param.layout.shard_dim, owned.start, len(owned)))
            if mesh_info.replicate_group is None:
                return
        buffer = storage.buffer.to(group.spec.device)
        if self.options.rank0_only and _is_in_first_replica(group):
            rows = self._rows_of(values, buffer) if values else None
            scatter_from_first(buffer, rows, mesh_info.shard_group, group.label)
        if mesh_info.replicate_group is not None:
            broadcast_from_first(buffer, mesh_info.replicate_group, label=group.label)
        if buffer is not storage.buffer:
            storage.buffer.copy_(buffer)
        increment_version(storage.locals)

    def _rows_of(self, values: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """Return the flat shards ``[shard_count, n]`` of all ranks."""
        rows = own.new_zeros(self._group.spec.mesh_info.shard_count, own.numel())
        for ours, theirs in self._pairs(rows, values):
            ours.copy_(theirs)
        return rows


def _is_in_first_replica(group: ParamGroup) -> bool:
    replicas = group.spec.mesh_info.replicate_group
    return replicas is None or replicas.rank() == 0


def check_may_summon(unit: Unit, options: SummonOptions) -> bool:
    """Return whether a unit is to be opened: not if that has been done, or it has no parameters.

    Raises:
        NotImplementedError: A parameter says itself what is gathered of it.
        RuntimeError: It cannot be opened now, or is open in another way.
    """
    if unit.group is None:
        return False
    if isinstance(unit.lifecycle, SummonedLifecycle):
        unit.lifecycle.options.check_allows(options, unit.label)
        return False
    if not unit.lifecycle.is_between_steps():
        raise RuntimeError(
            f"unsharded_params cannot open unit {unit.label!r} while a forward or backward of its "
            "root runs. Before or around the forward it can; to read a weight inside a parent's "
            "forward, pass unshard_on_access=True to fully_shard."
        )
    check_not_subclass(unit.group.tensors, "meshard.unsharded_params")
    unit.group.adopt_edits()
    unit.group.tensors.check_materialised()
    return True


@contextlib.contextmanager
def unsharded_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    rank0_only: bool = False,
    writeback: bool = True,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Have the parameters of ``module`` whole inside, and edits in the shards afterwards.

    Inside, parameters are plain tensors of the dtype that the shards have, so that nothing is
    rounded (those that tensor parallelism has placed are the DTensors that forward sees);
    ``state_dict``, ``load_state_dict``, ``functional_call`` and ``module(...)`` work as on a plain
    module, without communication. Edit them in place, or assign others of the same shape.
    ``.grad`` is None; gradients of what is computed from them reach the shards, also after the
    block. An exception leaves the shards of all ranks as they were.

    **Collective:** every rank of the mesh, entry and exit.
    **Lifetime:** the whole parameters live until the exit, unless something else refers to them.

    Args:
        module: A module with units in it.
        recurse: Also the units inside ``module``, which is one itself otherwise.
        rank0_only: Have whole parameters on the first rank of the mesh only, whose edits are sent
            to all. The others keep seeing their shards, which they must not edit.
        writeback: Write edits back. Every rank writes its own part, so all must make the same
            edits; of several replicas, the first one's count.
        offload_to_cpu: Hold the whole parameters in host memory.

    Raises:
        NotImplementedError: A parameter has ``fsdp_pre_all_gather``.
        RuntimeError: A forward or backward is running; the units are open in another way; what was
            assigned cannot be written back; or another rank has raised inside.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2, bias=False))
    >>> with meshard.unsharded_params(layer), torch.no_grad():
    ...     _ = torch.nn.init.eye_(layer.weight)
    >>> layer.weight.detach().full_tensor()
    tensor([[1., 0.],
            [0., 1.]])
    """
    options = SummonOptions(writeback, rank0_only, offload_to_cpu)
    summoned: list[SummonedUnit] = []
    values: list[list[torch.Tensor]] = []
    has_failed = False
    try:
        summoned += _summon(_units_of(module, recurse), options)
        try:
            yield
            if writeback:
                values += [each.edited_values() for each in summoned]
        except Exception:
            if writeback:
                _has_any_failed(summoned, here=True)
            raise
        has_failed = writeback and _has_any_failed(summoned, here=False)
    finally:
        for each in summoned:
            each.close()
    if has_failed:
        raise RuntimeError(
            "another rank raised inside unsharded_params; nothing was written back on any rank."
        )
    if writeback:
        for each, edited in zip(summoned, values, strict=True):
            each.write(edited)
            edited.clear()


def _units_of(module: nn.Module, recurse: bool) -> list[Unit]:
    units = list(units_in(module)) if recurse else units_of(module)
    if not units:
        raise ValueError(
            f"there is no unit in this {type(module).__name__}; pass a module that fully_shard was "
            "applied to, or one around it (with recurse=True)."
        )
    return units


def _summon(units: list[Unit], options: SummonOptions) -> list[SummonedUnit]:
    wanted = [unit for unit in units if check_may_summon(unit, options)]
    summoned: list[SummonedUnit] = []
    try:
        for unit in wanted:
            summoned.append(SummonedUnit(unit, options))
    except BaseException:
        for each in summoned:
            each.close()
        raise
    return summoned


def _has_any_failed(summoned: list[SummonedUnit], *, here: bool) -> bool:
    """Return whether any rank raised: edits are written back on all ranks, or on none."""
    if not summoned:
        return here
    mesh_infos = {id(each.spec.mesh_info): each.spec.mesh_info for each in summoned}.values()
    groups = [
        g
        for mesh_info in mesh_infos
        for g in (mesh_info.shard_group, mesh_info.replicate_group)
        if g
    ]
    failed = torch.tensor(float(here), device=summoned[0].spec.device)
    for group in dict.fromkeys(groups):
        agree_on_max(failed, group, "(unsharded_params)")
    return bool(failed.item())
