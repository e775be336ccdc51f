"""The weights of a module, and which rank holds which part of each.

A part is a box (``_mesh/boxes.py``). Boxes follow from the placements, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from meshard._engine.param_group import sharded_params
from meshard._engine.unit import units_in, without_compile
from meshard._mesh.boxes import Box, box_at, coordinate_of
from meshard._mesh.mesh_info import device_of
from meshard._torch.dtensor import is_plain, local_of, plain_of

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
    at_rest = shards_of(module)
    weights = [
        Weight(fqn_without_wrappers(name), at_rest.get(id(value), value))
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]
    for weight in weights:
        _check_readable(weight, caller)
    return weights


def unchecked_weights(module: nn.Module) -> list[Weight]:
    """Return what ``weights_of`` returns, but for hooks, without names and without its checks.

    All ranks have its meshes, so that they can tell each other of what one of them refuses.
    """
    return [Weight("", tensor) for tensor in held_tensors(module)]


def held_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, and the sharded parameters while modules hold unsharded ones.

    A tensor may be there twice.
    """
    return [*module.parameters(), *module.buffers(), *shards_of(module).values()]


def shards_of(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded parameters by the ids of the unsharded ones.

    Modules hold the unsharded ones after ``unshard()``, and after a forward that left them so.
    """
    return {
        id(param.unsharded): param.sharded
        for unit in units_in(module)
        for param in sharded_params(unit.group)
    }


def _check_readable(weight: Weight, caller: str) -> None:
    if not is_plain(weight.local):
        raise NotImplementedError(
            f"{weight.fqn!r} is a {type(weight.local).__name__}, whose values {caller} cannot read "
            "as one ordinary tensor; convert it before, or save the module's state_dict() with "
            "torch.distributed.checkpoint."
        )
    _check_is_block(weight)


def _check_is_block(weight: Weight) -> None:
    if not isinstance(weight.tensor, DTensor):
        return
    partial = [each for each in weight.tensor.placements if each.is_partial()]
    if partial:
        raise NotImplementedError(
            f"{weight.fqn!r} has the placement {partial[0]}, a sum that has not been taken; "
            "redistribute it to Shard or Replicate before."
        )
    local, expected = tuple(local_of(weight.tensor).shape), weight.own_box.sizes
    if local != expected:
        raise NotImplementedError(
            f"{weight.fqn!r} has a local tensor of shape {local} on this rank, where its "
            f"placements {weight.tensor.placements} on {weight.mesh} say {expected}; such uneven "
            "placements are not supported."
        )


def held_box(fqn: str, tensor: torch.Tensor) -> Box | None:
    """Return the block of any tensor that this rank holds; None: the rank is not in its mesh.

    Raises:
        NotImplementedError: It is no block: a partial sum, or a placement of another kind.
    """
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return None
    weight = Weight(fqn, tensor)
    _check_is_block(weight)
    return weight.own_box


def check_are_held(module: nn.Module, weights: Iterable[Weight]) -> None:
    """Raise if a hook of ``state_dict()`` has made a weight: writing to it changes nothing."""
    ids = {id(tensor) for tensor in held_tensors(module)}
    for weight in weights:
        if id(weight.tensor) not in ids:
            raise NotImplementedError(
                f"{weight.fqn!r} is neither a parameter nor a buffer: a hook of state_dict() has "
                "made it, so it cannot be filled in place; use load_state_dict."
            )


def check_have_values(weights: Iterable[Weight], caller: str) -> None:
    """Raise, naming them, if weights are on the meta device."""
    meta = [weight.fqn for weight in weights if weight.local.is_meta]
    if meta:
        raise ValueError(
            f"{len(meta)} tensors are on the meta device and have no values for {caller}, first "
            f"{meta[0]!r}; give them values by meshard.materialize, load_state_dict or "
            "meshard.checkpoint.load_pretrained first."
        )


def meshes_of(module: nn.Module, weights: Iterable[Weight]) -> list[DeviceMesh]:
    """Return the meshes of all weights and of all units, the largest first."""
    found = [weight.mesh for weight in weights if weight.mesh is not None]
    found += [unit.group.spec.mesh_info.mesh for unit in units_in(module) if unit.params]
    return sorted(dict.fromkeys(found), key=lambda mesh: -mesh.size())


def ranks_of_meshes(meshes: Iterable[DeviceMesh]) -> list[int]:
    """Return the global ranks of all meshes, in order; without a mesh, this rank."""
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return sorted(ranks) or [own_rank()]


def device_of_weights(meshes: Sequence[DeviceMesh]) -> torch.device:
    """Return the device that small tensors are sent from."""
    return device_of(meshes[0]) if meshes else torch.device("cpu")
