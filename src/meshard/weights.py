"""Unsharded weights between steps, to read and to edit.

A unit is *summoned* while its modules hold the parameters of ``unsharded_params``. These are plain,
in memory of their own, and in the dtype of the shards, because the dtype in which the unit computes
may be narrower and would round edits. The modules run like ordinary ones: their hooks neither
gather, reshard nor cast. Gradients of the unsharded parameters are reduced together with those of
ordinary forwards.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import (
    agree_on_max,
    broadcast,
    gather_from_all,
    gather_to,
    scatter_from_first,
    send_max,
)
from meshard._engine.param_group import (
    ParamGroup,
    SummonOptions,
    forget_summoned,
    register_summoned,
    sharded_params,
)
from meshard._engine.unit import Unit, alive, joined, require_units
from meshard._mesh.layout import matching_parts
from meshard._params.flat_params import FlatParams, FlatShard, check_not_custom
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import ShardedParam, TensorTag, prepare_tag
from meshard._torch.dtensor import is_placed_like, local_of
from meshard.policies import check_bool


@contextlib.contextmanager
def unsharded_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    rank0_only: bool = False,
    writeback: bool = True,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Unshard the parameters of ``module`` inside the block; write edits back to the shards.

    Inside, parameters are plain tensors in the dtype of the shards (or the DTensors of tensor
    parallelism): edit them in place, or assign others of the same shape. Gradients of what is
    computed from them, not from assigned ones, reach the shards: ``zero_grad`` and
    ``clip_grad_norm_`` find them there. An exception inside leaves the shards of all ranks as they
    were, and so does a ``KeyboardInterrupt``. But if it comes while edits are written back, some
    ranks may have the edits, and others not.

    **Collective:** every rank of the mesh, entry and exit.

    Parameters of ``replicate`` stay as they are, so edit these in place: what is assigned takes
    their place for good, unless edits are undone, and optimizers must be built anew.

    Args:
        module: A module with units in it.
        recurse: Unshard the units inside ``module`` too. If False, ``module`` must be a unit.
        rank0_only: Unshard on the first rank of the mesh only, whose edits are sent to all.
        writeback: Write edits back. Every rank writes its own part, so all ranks must make the same
            edits. Units that a block around this one has unsharded are written back as that says.
        offload_to_cpu: Hold the unsharded parameters in host memory. Replicated parameters stay
            where they are; this is then about the copy of them that is taken to undo edits.

    Raises:
        NotImplementedError: A parameter has ``fsdp_pre_all_gather``.
        RuntimeError: A forward or backward is running; the call is inside one with other arguments;
            what was assigned cannot be written back; or another rank raised inside.
        ValueError: There is no unit in ``module``, or ``rank0_only`` and one is replicated.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2, bias=False))
    >>> with meshard.unsharded_params(layer), torch.no_grad():
    ...     _ = torch.nn.init.eye_(layer.weight)
    >>> layer.weight.detach().full_tensor()
    tensor([[1., 0.],
            [0., 1.]])
    """
    check_bool("rank0_only", rank0_only)
    check_bool("writeback", writeback)
    check_bool("offload_to_cpu", offload_to_cpu)
    options = SummonOptions("unsharded_params", writeback, rank0_only, offload_to_cpu)
    summoned: list[SummonedUnit] = []
    replicated: list[_ReplicatedUnit] = []
    keeps_edits = False
    try:
        units = require_units(module, recurse=recurse)
        for unit in [each for each in units if _needs_summon(each, options)]:
            summoned.append(SummonedUnit(unit, options, _gather(unit.group, options)))
        copied_to = torch.device("cpu") if offload_to_cpu else None
        replicated += [_ReplicatedUnit(u.group, copied_to) for u in units if _is_replicated(u)]
        groups = [each.group for each in summoned] + [each.group for each in replicated]
        try:
            yield
            if writeback:
                _refuse_ties(units)
            values = [each.edited_values() for each in summoned if writeback]
        except (Exception, KeyboardInterrupt) as error:
            if writeback:
                # Ctrl-C must not wait for ranks that it may have stopped elsewhere.
                _has_any_failed(groups, here=True, waits=isinstance(error, Exception))
            raise
        has_failed = writeback and _has_any_failed(groups, here=False)
        keeps_edits = writeback and not has_failed
    finally:
        for each in summoned:
            each.close()
        for replica in () if keeps_edits else replicated:
            replica.restore()
    if has_failed:
        raise RuntimeError(
            "another rank raised inside unsharded_params; nothing was written back on any rank."
        )
    for each, edited in zip(summoned if writeback else (), values, strict=True):
        if rank0_only:
            _write_from_first(each.group, edited)
        else:
            each.write(edited)
            _send_to_replicas(each.group)
        edited.clear()


def _refuse_ties(units: Sequence[Unit]) -> None:
    """Raise a RuntimeError if one tensor is assigned to two parameters of summoned units.

    Units that a block around this one has summoned count too, wherever they are in the model.
    """
    names: dict[int, str] = {}
    roots = dict.fromkeys(unit.root for unit in units)
    for unit in [each for root in roots for each in alive(root.units)]:
        group = unit.group
        if not group.is_summoned or not group.summoned_by.unshards_here(group):
            continue
        for param in group.params:
            name = joined(unit.fqn, param.fqn)
            for value in param.installed():
                if value is not None and names.setdefault(id(value), name) != name:
                    raise RuntimeError(
                        f"parameter {name!r} was tied to {names[id(value)]!r} inside "
                        "unsharded_params; each has a shard of its own, so the tie would be cut "
                        "silently. Tie parameters before fully_shard."
                    )


def _needs_summon(unit: Unit, options: SummonOptions) -> bool:
    """Return whether a unit has shards and is not summoned yet. Raises if it cannot be summoned."""
    if not unit.params:
        return False
    if _is_replicated(unit) and options.rank0_only:
        raise ValueError(
            f"unit {unit.label!r} is replicated: every rank has ordinary parameters, and edits of "
            "rank 0 would not reach the others; make them on all ranks, without rank0_only."
        )
    if unit.group.is_summoned:
        unit.group.summoned_by.check_allows(options, unit.label)
        return False
    unit.lifecycle.check_between_steps(unit, options.caller)
    unit.group.finish_pending_step()
    unit.group.adopt_edits()
    if _is_replicated(unit):
        return False
    check_not_custom(unit.group.unit_params, "meshard.unsharded_params")
    unit.group.unit_params.check_materialised()
    return True


def _is_replicated(unit: Unit) -> bool:
    return bool(unit.params) and isinstance(unit.group.unit_params, ReplicatedParams)


def _has_any_failed(param_groups: list[ParamGroup], *, here: bool, waits: bool = True) -> bool:
    """Return whether any rank raised: edits are written back on all ranks, or on none.

    Without ``waits``, this rank tells the others that it raised, and does not wait for an answer.
    **Collective:** the ranks of all meshes of these groups.
    """
    groups = {group: None for each in param_groups for group in each.spec.mesh_info.groups}
    if not groups:
        return here
    failed = torch.tensor(float(here), device=param_groups[0].spec.device)
    for group in groups:
        (agree_on_max if waits else send_max)(failed, group, "(unsharded_params)")
    return bool(failed.item())


class _ReplicatedUnit:
    """The values of a replicated unit at the entry of ``unsharded_params``."""

    def __init__(self, group: ParamGroup, copied_to: torch.device | None) -> None:
        """Copy the values to ``copied_to``; None: to the device that they are on."""
        self.group = group
        self._num_steps = group.num_steps
        held = [param.sharded.detach() for param in group.params]
        self._values = [each.to(copied_to or each.device, copy=True) for each in held]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo edits, unless an optimizer has stepped meanwhile."""
        if self.group.num_steps == self._num_steps:
            for param, value in zip(self.group.params, self._values, strict=True):
                param.install(param.sharded)
                # Even a copy that changes nothing raises the version, and then autograd refuses the
                # graphs that have saved the parameter.
                if not torch.equal(param.sharded, value.to(param.sharded.device)):
                    param.sharded.copy_(value)


class SummonedUnit:
    """A unit whose modules hold unsharded parameters of their own, until ``close``."""

    def __init__(self, unit: Unit, options: SummonOptions, unsharded: list[nn.Parameter]) -> None:
        """Install ``unsharded``, one for each parameter; empty on ranks that keep the shards."""
        self.unit = unit
        self.params = sharded_params(unit.group)
        self._options = options
        self.group = unit.group
        self._version = self.group.version
        self.is_unsharded = bool(unsharded)
        # The tags of the installed parameters, for ``close``. References to the tensors would keep
        # alive what the user replaces. Weak references would not do either: torch cannot swap a
        # tensor that has one, as ``load_state_dict`` may.
        self._tags: list[list[str | None]] = []
        self.group.summon(options)
        try:
            self._install(unsharded)
            register_summoned(self.group)
        except BaseException:  # such as a KeyboardInterrupt
            self.close()
            raise

    def _install(self, unsharded: list[nn.Parameter]) -> None:
        unit_ref = weakref.ref(self.unit)
        for index, unsharded_param in enumerate(unsharded):
            param = self.params[index]
            self._tags.append(prepare_tag(unsharded_param))
            if unsharded_param.is_floating_point():
                unsharded_param.requires_grad_(True)  # torch refuses a hook otherwise
                unsharded_param.register_post_accumulate_grad_hook(partial(_join, unit_ref, index))
                unsharded_param.requires_grad_(param.sharded.requires_grad)
            param.install(unsharded_param)

    def edited_values(self) -> list[torch.Tensor]:
        """Return what the modules hold now, to be written back; empty if they hold shards.

        A DTensor of tensor parallelism is returned as this rank's local tensor.
        """
        if self.group.version != self._version:
            raise RuntimeError(
                f"the shards of unit {self.unit.label!r} were edited inside {self._options.caller} "
                "(by an optimizer's step?), and writing back would undo that; step outside of it, "
                "or pass writeback=False."
            )
        return [self._value_of(param) for param in self.params if self.is_unsharded]

    def _value_of(self, param: ShardedParam) -> torch.Tensor:
        held = list({id(value): value for value in param.installed()}.values())
        if not held:
            raise RuntimeError(
                f"the module of parameter {param.fqn!r} of unit {self.unit.label!r} was replaced "
                f"inside {self._options.caller} or before it. Keep the module, and assign a plain "
                f"tensor of shape {tuple(param.layout.shape)} to its parameter; a module of "
                "another shape is put in before fully_shard."
            )
        value, placement = held[0], param.dtensor_placement
        if len(held) == 1 and value is not None and not value.is_meta:
            if placement is not None and is_placed_like(value, param.unsharded):
                return local_of(value.detach())
            if not isinstance(value, DTensor):
                if placement is not None and value.shape == param.sharded.shape:
                    return placement.cut(value.detach())
                if value.shape == param.layout.shape:
                    return value.detach()
        found = " and ".join(
            "nothing" if each is None else f"a {type(each).__name__} of shape {tuple(each.shape)}"
            for each in held
        )
        raise RuntimeError(
            f"parameter {param.fqn!r} of unit {self.unit.label!r} was replaced inside "
            f"{self._options.caller} by {found}, which cannot be written back; assign one plain "
            f"tensor of shape {tuple(param.layout.shape)} to all of its names, or edit it in place."
        )

    def close(self) -> None:
        """Install the shards again. Does not communicate."""
        forget_summoned(self.group)
        for tag, param in zip(self._tags, self.params, strict=False):
            # The user may have built an optimizer in the block. By this tag its step can say why it
            # would never train the model.
            tag[:] = TensorTag.SUMMONED.name, param.fqn
        for param in self.params:
            # Take over requires_grad from the unsharded parameter, where the user may have set it.
            flags = {value.requires_grad for value in param.installed() if value is not None}
            if self.is_unsharded and not self._options.rank0_only and len(flags) == 1:
                param.sharded.requires_grad_(flags.pop())
            param.install(param.sharded)
        self.group.dismiss()

    @torch.no_grad()
    def write(self, values: list[torch.Tensor]) -> None:
        """Copy this rank's part of what ``edited_values`` returned into the shards."""
        self.group.finish_copies()
        shard_rank = self.group.spec.mesh_info.shard_rank
        for param, value in zip(self.params, values, strict=True):
            part = param.layout.own_part(value, shard_rank)
            local_of(param.sharded).copy_(part)


# --- collectives ---------------------------------------------------------------------------


def _gather(group: ParamGroup, options: SummonOptions) -> list[nn.Parameter]:
    """Return the unsharded parameters; an empty list on ranks that keep the shards.

    **Collective:** the shard group; with ``rank0_only`` only that of the first replica.
    """
    storage, mesh_info = _storage_of(group), group.spec.mesh_info
    group.end_unshard()
    group.reshard()
    own = storage.buffer.to(group.spec.device)
    rows = None
    if not options.rank0_only:
        rows = gather_from_all(own, mesh_info.shard_group, label=group.label)
    elif mesh_info.is_in_first_replica:
        rows = gather_to(own, mesh_info.shard_group, group.label)
    if rows is None:
        return []
    with torch.inference_mode(False), torch.no_grad():
        values = [
            torch.empty(param.layout.shape, dtype=param.sharded.dtype, device=own.device)
            for param in group.params
        ]
        for ours, theirs in _pairs(storage, rows, values):
            theirs.copy_(ours)
        del rows
        if options.offload_to_cpu:
            values = [value.cpu() for value in values]
        return [
            param.as_used(nn.Parameter(value, requires_grad=False))
            for param, value in zip(sharded_params(group), values, strict=True)
        ]


@torch.no_grad()
def _write_from_first(group: ParamGroup, values: list[torch.Tensor]) -> None:
    """Write the values of the first rank into the shards of all.

    **Collective:** the shard group of the first replica, then the replica groups.
    """
    storage, mesh_info = _storage_of(group), group.spec.mesh_info
    group.finish_copies()
    if mesh_info.is_in_first_replica:
        buffer = storage.buffer.to(group.spec.device)
        rows = None
        if values:
            rows = buffer.new_zeros(mesh_info.shard_count, buffer.numel())
            for ours, theirs in _pairs(storage, rows, values):
                ours.copy_(theirs)
        scatter_from_first(buffer, rows, mesh_info.shard_group, group.label)
        storage.buffer.copy_(buffer)
    _send_to_replicas(group)
    increment_version(storage.locals)


@torch.no_grad()
def _send_to_replicas(group: ParamGroup) -> None:
    """Overwrite the shards of every replica by those of the first.

    **Collective:** the replica group.
    """
    storage, replicas = _storage_of(group), group.spec.mesh_info.replicate_group
    if replicas is not None:
        buffer = storage.buffer.to(group.spec.device)
        broadcast(buffer, replicas, label=group.label)
        storage.buffer.copy_(buffer)
        increment_version(storage.locals)


def _storage_of(group: ParamGroup) -> FlatShard:
    assert isinstance(group.unit_params, FlatParams)  # see _needs_summon
    return group.unit_params.flat_shard


def _pairs(
    storage: FlatShard, rows: torch.Tensor, unsharded: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over pairs of views of the same elements, one in ``rows`` and one in ``unsharded``.

    ``rows`` is ``[shard_count, n]``.
    """
    layout = storage.layout
    for segment, part in zip(layout.segments, layout.split(rows), strict=True):
        for param_range in segment.ranges:
            ranges = part.narrow(1, param_range.offset, param_range.numel)
            yield from matching_parts(
                ranges, unsharded[param_range.index], layout.params[param_range.index]
            )


# --- gradients -----------------------------------------------------------------------------


def _join(unit_ref: weakref.ref[Unit], index: int, unsharded: torch.Tensor) -> None:
    """Add the gradient of a summoned parameter to those of the unit, to be reduced with them."""
    unit, gradient = unit_ref(), unsharded.grad
    unsharded.grad = None
    if unit is None or gradient is None:
        return
    # Called before .grad is set: it may clean up after a step that failed, which drops .grad.
    unit.lifecycle.gradient_from_outside(unit)
    unsharded_param = unit.group.params[index].unsharded
    moved = gradient.to(unsharded_param.device, unsharded_param.dtype)
    unsharded_param.grad = moved if unsharded_param.grad is None else unsharded_param.grad + moved
