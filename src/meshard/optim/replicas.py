"""Optimizer state that is cut over the replicas too.

On a mesh ``(replicate, shard)`` each of ``R`` replicas steps its *part*, one ``R``-th, of this
rank's shards. Gradients come reduce-scattered over the replicas (see ``Reduction``), and an
all-gather over them brings the stepped parts to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshard._comm.all_gather import GatherPlan
from meshard._comm.communicator import DONE, CommStream, Handle
from meshard._engine.param_group import ParamGroup, owner_of
from meshard._engine.unit import Unit
from meshard._mesh.layout import FlatLayout
from meshard._params.unit_params import ReplicaParts, ShardedParam
from meshard._torch.dtensor import is_placed_like, is_plain, local_of, set_local


def part_of(param: torch.Tensor) -> torch.Tensor:
    """Return what this rank steps of a parameter: its part of the shard, or all of that."""
    group = owner_of(param)
    parts = None if group is None else group.unit_params.parts
    return param if group is None or parts is None else parts.part(group.indices[id(param)])


def cut_to_part(param: torch.Tensor, tensor: Any, *, copies: bool = False) -> Any:
    """Return this rank's part of ``tensor`` if it is placed like ``param``, else the tensor.

    The part is a view, or with ``copies`` has memory of its own.
    """
    group = owner_of(param)
    parts = None if group is None else group.unit_params.parts
    if group is None or parts is None or not is_placed_like(tensor, param):
        return tensor
    part = parts.cut(group.indices[id(param)], local_of(tensor))
    if copies:
        set_local(part, local_of(part).clone())
    return part


def cut_over_replicas(units: Sequence[Unit], params: Sequence[torch.Tensor]) -> list[PartsGather]:
    """Let units reduce-scatter gradients over the replicas. Return what gathers their weights.

    Raises a ValueError if the optimizer of ``params`` cannot have its state cut.
    """
    held, gathers = {id(param) for param in params}, []
    for unit in units:
        group, info = unit.group, unit.group.spec.mesh_info
        of_unit = [each.sharded for each in group.params]
        if not any(id(each) in held for each in of_unit):
            continue
        refused = {
            "replicate keeps gradients whole: call fully_shard on a mesh (replicas, 1)": (
                group.gradients.is_replicated
            ),
            "its mesh has no replicas: make a mesh (replicate, shard)": not info.replicate_group,
            "its mesh has several axes of replicas": info.mesh.ndim > 2,
            "it has parameters of another parallelism": info.full is not None,
            "it has parameters of a tensor subclass": not all(
                isinstance(each, ShardedParam) and is_plain(local_of(each.sharded))
                for each in group.params
            ),
            "its shards are in host memory": group.spec.host is not None,
            "the optimizer has only some of its trainable parameters": any(
                each.requires_grad and id(each) not in held for each in of_unit
            ),
        }
        for reason, is_refused in refused.items():
            if is_refused:
                raise ValueError(
                    f"over_replicas=True: unit {unit.label!r} is refused, as {reason}."
                )
        gathers.append(PartsGather(group, [i for i, p in enumerate(of_unit) if id(p) in held]))
    for gather in gathers:
        group = gather.group
        sharded = [param for param in group.params if isinstance(param, ShardedParam)]
        group.unit_params.parts = ReplicaParts(sharded, group.spec.mesh_info)
    return gathers


class PartsGather:
    """The all-gather over the replicas of the parts that they have stepped, of one unit.

    Until the shards are whole again it is the ``pending_step`` of the unit, for which the next
    gather waits, and what reads a shard.
    """

    def __init__(self, group: ParamGroup, indices: Sequence[int]) -> None:
        self.group, self._indices = group, indices
        self._shards: list[torch.Tensor] = []  # that ``_plan`` fills
        self._plan: GatherPlan
        self._gather: Handle = DONE

    def start(self) -> None:
        """Start the gather. **Collective:** the replicas, the units in the same order."""
        group, comm = self.group, self.group.comm
        parts = group.unit_params.parts
        assert parts is not None
        shards = [local_of(param.sharded) for param in group.params]
        if list(map(id, shards)) != list(map(id, self._shards)):
            layout = FlatLayout.build(parts.layouts, [each.dtype for each in shards], self._indices)
            self._plan, self._shards = GatherPlan(layout, layout, shards), shards
        layout = self._plan.on_wire
        numel, dtype = layout.shard_form
        with comm.on_stream(CommStream.GATHER), torch.no_grad():
            memory = comm.gather_memory(numel, dtype, device=group.spec.device, group=parts.group)
            own = memory[parts.rank]
            for segment, view in zip(layout.segments, layout.split(own), strict=True):
                for each in segment.ranges:
                    part = local_of(parts.part(each.index))
                    view.narrow(0, each.offset, part.numel()).copy_(part.reshape(-1))
            self._gather = comm.without_custom.all_gather(
                own, group=parts.group, label=group.label, memory=memory
            )
            group.pending_step = self
            if not comm.waits_block_host:
                gather = self._gather
                gather.wait()
                self._plan.copy_out(gather.result)
                self._gather = comm.record(gather.result, after=gather)

    def before_gather(self) -> None:
        """Make the next gather of the unit wait, which on a device runs on the same stream."""
        if self.group.comm.waits_block_host:
            self.finish()

    def finish(self) -> None:
        """Make what the caller does next see whole shards. **Stream:** the current one waits."""
        gather = self._gather
        gather.wait()
        if self.group.comm.waits_block_host and gather is not DONE:
            with torch.no_grad():
                self._plan.copy_out(gather.result)
            gather.release()
            self._gather, self.group.pending_step = DONE, None
