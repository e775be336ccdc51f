"""The weights of a module, and which rank holds which part of each.

A part is a box (``_mesh/boxes.py``). Boxes follow from the placements, without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from meshard._engine.param_group import sharded_params_of
from meshard._engine.unit import units_in, without_compile
from meshard._mesh.boxes import Box, box_at, coordinate_of
from meshard._torch.dtensor import is_plain, plain_of

# What torch.compile and activation checkpointing put into names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter or persistent buffer, as ``state_dict()`` has it: a DTensor, or whole.

    Tied parameters are several weights with one ``tensor``, which is that of the module.
    """

    fqn: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The unsharded shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight at rest."""
        return self.tensor.dtype

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it: its own memory, no copy."""
        return plain_of(self.tensor)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that it lies over; None if it is no DTensor."""
        return self.tensor.device_mesh if isinstance(self.tensor, DTensor) else None

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        """The axes of the mesh that it is cut over, and of more than one rank."""
        if not isinstance(self.tensor, DTensor):
            return ()
        mesh = self.tensor.device_mesh
        placements = enumerate(self.tensor.placements)
        return tuple(
            axis for axis, each in placements if not each.is_replicate() and mesh.size(axis) > 1
        )

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """Return the box of the rank at ``coordinate`` of the mesh, a number for each axis."""
        if isinstance(self.tensor, DTensor):
            return box_at(
                self.tensor.shape, self.tensor.device_mesh, self.tensor.placements, coordinate
            )
        return Box.of_all(self.shape)

    @property
    def own_box(self) -> Box:
        """The box that this rank holds."""
        return self.box_at(() if self.mesh is None else coordinate_of(self.mesh))

    @property
    def boxes(self) -> list[Box]:
        """The boxes that are the whole: of this rank, and of those that it is cut over with it."""
        if self.mesh is None:
            return [self.own_box]
        places: list[Iterable[int]] = [(position,) for position in coordinate_of(self.mesh)]
        for axis in self.sharded_axes:
            places[axis] = range(self.mesh.size(axis))
        return [self.box_at(place) for place in itertools.product(*places)]


def own_rank() -> int:
    """Return this process's global rank: 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


# --- of a module -----------------------------------------------------------------------------


def fqn_without_wrappers(name: str) -> str:
    """Return the name of a parameter as it is without the wrappers of torch."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside torch's DDP, ``torch.compile`` and ``AveragedModel``."""
    inner = without_compile(module)
    if isinstance(inner, (DistributedDataParallel, AveragedModel)):
        inner = inner.module
    return module if inner is module else without_wrappers(inner)


def weights_of(module: nn.Module, caller: str) -> list[Weight]:
    """Return what ``module.state_dict()`` has, in its order, sharded; or raise.

    Names are without the parts that ``torch.compile`` and activation checkpointing add.
    """
    for unit in units_in(module):
        unit.lifecycle.check_between_steps(unit, caller)
        unit.group.check_not_summoned(f"read by {caller}")
    state = module.state_dict(keep_vars=True)
    tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    # After ``unshard()``, and after some forwards, modules hold unsharded parameters.
    shards = sharded_params_of(tensors.values())
    weights = [
        Weight(fqn_without_wrappers(name), shard)
        for name, shard in zip(tensors, shards, strict=True)
    ]
    for weight in weights:
        if not is_plain(weight.local):
            raise NotImplementedError(
                f"{weight.fqn!r} is a {type(weight.local).__name__}, which {caller} cannot read as "
                "one ordinary tensor; convert it before, or save it by Checkpointer."
            )
        _block_of(weight)
    return weights


def held_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, and the sharded parameters while modules hold unsharded ones.

    A tensor may be there twice.
    """
    held = [*module.parameters(), *module.buffers()]
    return held + sharded_params_of(held)


def _block_of(weight: Weight) -> Box:
    """Return the box of this rank, or raise if it holds a partial sum or another shape."""
    if not isinstance(weight.tensor, DTensor):
        return weight.own_box
    local, placements = tuple(weight.local.shape), weight.tensor.placements
    if any(each.is_partial() for each in placements) or local != (box := weight.own_box).sizes:
        raise NotImplementedError(
            f"{weight.fqn!r} has the placements {placements} on {weight.mesh}, and here the local "
            f"shape {local}: a partial sum, or a shard of unusual size; redistribute it to Shard "
            "or Replicate before."
        )
    return box


def held_box(fqn: str, tensor: torch.Tensor) -> Box | None:
    """Return the block of any tensor that this rank holds; None: the rank is not in its mesh.

    Raises:
        NotImplementedError: It is no block: a partial sum, or a placement of another kind.
    """
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return None
    return _block_of(Weight(fqn, tensor))


def meshes_of(module: nn.Module) -> list[DeviceMesh]:
    """Return the meshes of all weights and of all units, the largest first."""
    found = [each.device_mesh for each in held_tensors(module) if isinstance(each, DTensor)]
    found += [unit.group.spec.mesh_info.mesh for unit in units_in(module) if unit.params]
    return sorted(dict.fromkeys(found), key=lambda mesh: -mesh.size())


def ranks_of_meshes(meshes: Iterable[DeviceMesh]) -> list[int]:
    """Return the global ranks of all meshes, in order; without a mesh, this rank."""
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return sorted(ranks) or [own_rank()]
