"""Moves of a whole model to host memory and back, to lend the device to something else."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._engine.unit import Unit, require_units
from meshard._gradients.accumulator import GradientAccumulator
from meshard._params.flat_params import FlatParams, check_not_custom
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import MemoryLocation
from meshard._torch.dtensor import move_local, plain_of
from meshard._torch.private import tree_flatten


class Offloaded(contextlib.ExitStack):
    """A context manager around an offloaded model, which brings it back at the end."""


def offload(module: nn.Module, optimizer: Optimizer | None = None) -> Offloaded:
    """Move all shards, gradients and optimizer state to the host, until ``onload``.

    Parameters, gradients and state tensors stay the same objects, so an optimizer that holds them
    goes on as before. The device's memory is free when this returns. Nothing is communicated.
    Of ``optimizer`` the state for the parameters of ``module`` is moved. Buffers,
    ``ignored_params``, their state and units with a ``CPUOffloadPolicy`` stay where they are. Until
    ``onload``, a forward raises an error.

    Returns:
        A context manager that calls ``onload`` at its end. Without it, call ``onload`` yourself.

    Raises:
        NotImplementedError: A parameter has ``fsdp_pre_all_gather``, or a unit is replicated.
        RuntimeError: A step is running, or accumulated gradients are not in ``.grad`` yet.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> with meshard.offload(layer, optimizer):
    ...     pass  # the device is free
    """
    _move(module, optimizer, to_host=True)
    offloaded = Offloaded()
    offloaded.callback(onload, module, optimizer)
    return offloaded


def onload(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Undo ``offload``: bring shards, gradients and optimizer state back to the device.

    Training continues bit for bit as without the two calls. Arguments are those of ``offload``;
    what is not offloaded stays where it is.

    Raises:
        RuntimeError: A forward or backward is running.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> _ = meshard.offload(layer)
    >>> meshard.onload(layer)
    """
    _move(module, optimizer, to_host=False)


@torch.inference_mode(False)  # the module may train again, so it must hold no inference tensors
@torch.no_grad()
def _move(module: nn.Module, optimizer: Optimizer | None, *, to_host: bool) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an Optimizer or None, got {type(optimizer).__name__}.")
    units = require_units(module)
    caller = "meshard.offload" if to_host else "meshard.onload"
    for unit in units:
        unit.lifecycle.check_between_steps(unit, caller)
        unit.group.finish_pending_step()
        unit.group.adopt_edits()
        check_not_custom(unit.group.unit_params, caller)
        if to_host and isinstance(unit.group.unit_params, ReplicatedParams):
            raise NotImplementedError(
                f"unit {unit.label!r} is replicated and cannot be offloaded; use "
                "module.to(device) between steps, or fully_shard, which can."
            )
        unit.group.check_may_step()
    sources: list[torch.Tensor] = []  # the old memory, kept until the copies from it are over
    for unit in units:
        group, gradients = unit.group, unit.gradients
        if not group.params or group.spec.host is not None:
            continue
        location = MemoryLocation.host_memory(group.spec.device, pin=True) if to_host else None
        if group.unit_params.is_offloaded is not to_host:
            group.end_unshard()
            group.reshard()
            # Freed even if set_keep_unsharded_storage(True) was called.
            group.unit_params.free_unsharded()
            group.adopt_edits()
            assert isinstance(group.unit_params, FlatParams)  # other units were refused above
            sources += group.unit_params.move(location)
            assert isinstance(gradients, GradientAccumulator)
            sources += gradients.published.move(location or group.spec.location)
        if optimizer is not None:
            sources += _move_state(optimizer, unit, location)
    groups = [unit.group for unit in units]
    for group in groups:
        group.comm.record().synchronize()
    del sources
    for kind in {group.spec.device.type for group in groups} - {"cpu"}:
        torch.get_device_module(kind).empty_cache()  # for other processes


# For each optimizer, the state tensors that offload() has moved to the host, by their ids. The
# references are weak, so that tensors which load_state_dict has replaced are freed.
_Tensors = weakref.WeakValueDictionary[int, torch.Tensor]
_moved: weakref.WeakKeyDictionary[Optimizer, _Tensors] = weakref.WeakKeyDictionary()


def _move_state(
    optimizer: Optimizer, unit: Unit, location: MemoryLocation | None
) -> list[torch.Tensor]:
    """Start copying the optimizer state of a unit's parameters; return the memory it was in.

    ``location`` None: back to the device.
    """
    device = unit.group.spec.device
    moved = _moved.setdefault(optimizer, weakref.WeakValueDictionary())
    sources = []
    for param in unit.group.params:
        for tensor in tree_flatten(optimizer.state.get(param.sharded))[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            local, was_moved = plain_of(tensor), moved.get(id(tensor)) is tensor
            if location is not None:
                if was_moved or local.device != device:
                    continue  # moved before, or kept on the host anyway, as AdamW's step count is
                moved[id(tensor)] = tensor
            elif was_moved:
                del moved[id(tensor)]
            elif not isinstance(tensor, DTensor) or local.device == device:
                # offload() did not move this tensor, so it stays. Only a DTensor on the host must
                # go to the device: it was loaded into the optimizer after offload().
                continue
            new = (location or MemoryLocation(device)).empty_like(local)
            new.copy_(local.detach(), non_blocking=True)
            sources.append(local.data)
            if isinstance(tensor, DTensor):
                move_local(tensor, new)
            else:
                tensor.data = new
    return sources
