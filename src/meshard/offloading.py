"""Moves of a whole model to host memory and back, for phases that need the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._engine.unit import Unit, require_units
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._params.storage import MemoryLocation
from meshard._params.subclass_params import check_not_subclass
from meshard._torch.dtensor import local_of, move_local
from meshard.optim.flat import forget_slices


class Offloaded:
    """A context manager around an offloaded model, which brings it back at the end.

    Args:
        module: The module that was offloaded.
        optimizer: The optimizer whose state was offloaded with it.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._module = module
        self._optimizer = optimizer

    def __enter__(self) -> None:
        """Do nothing: the model is offloaded already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Bring the model back, also after an exception."""
        onload(self._module, self._optimizer)


def offload(module: nn.Module, optimizer: Optimizer | None = None) -> Offloaded:
    """Move all shards, gradients and optimizer state to the host, until ``onload``.

    For phases in which something else needs the device, such as generation between two phases of
    training. Parameters, gradients and state tensors stay the same objects, so an optimizer that
    holds them goes on as before. The device's memory is free when this returns. State dicts may be
    read and loaded meanwhile; a forward raises. Nothing is communicated: ranks may do this at
    different times. Buffers, ``ignored_params`` and their state stay where they are.

    **Stream:** the current one; the host waits for the copies.

    Args:
        module: A module with units in it, usually the root. Units with a ``CPUOffloadPolicy`` are
            on the host already.
        optimizer: Its state for the parameters of ``module`` is moved too.

    Returns:
        A context manager that calls ``onload`` at its end. Without it, call ``onload`` yourself.

    Raises:
        NotImplementedError: A parameter has ``fsdp_pre_all_gather``.
        RuntimeError: A forward or backward is running, or accumulated gradients are not in
            ``.grad`` yet.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> with meshard.offload(layer, optimizer):
    ...     pass  # the device is free
    >>> layer(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    _move(module, optimizer, to_host=True)
    return Offloaded(module, optimizer)


def onload(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Undo ``offload``: bring shards, gradients and optimizer state back to the device.

    Training continues bit for bit as without the two calls. Does nothing to what is not offloaded.

    **Stream:** the current one; the host waits for the copies.

    Args:
        module: The module that was passed to ``offload``.
        optimizer: The optimizer that was passed to ``offload``.

    Raises:
        RuntimeError: A forward or backward is running.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> _ = meshard.offload(layer)
    >>> meshard.onload(layer)
    """
    _move(module, optimizer, to_host=False)


def _move(module: nn.Module, optimizer: Optimizer | None, *, to_host: bool) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an Optimizer or None, got {type(optimizer).__name__}.")
    units = require_units(module)
    for unit in units:
        _check_between_steps(unit, "offload" if to_host else "onload")
    forget_slices()
    sources: list[torch.Tensor] = []  # of copies that may still be running
    for unit in units:
        group, gradients = unit.group, unit.gradients
        if group is None or gradients is None or group.spec.host is not None:
            continue
        location = MemoryLocation.host_memory(group.spec.device, pin=True) if to_host else None
        if group.storage.is_offloaded is not to_host:
            group.reshard()
            group.adopt_edits()
            sources.append(group.storage.move(location))
            assert isinstance(gradients.sharded, ShardedGrads)
            sources += gradients.sharded.move(location or group.spec.location)
        if optimizer is not None:
            sources += _move_state(optimizer, unit, location)
    _synchronize(units)
    del sources
    _release_memory(units)


def _check_between_steps(unit: Unit, what: str) -> None:
    unit.lifecycle.check_between_steps(unit, f"meshard.{what}")
    if unit.group is not None:
        unit.group.finish_pending_step()
        unit.group.adopt_edits()
        check_not_subclass(unit.group.storage, f"meshard.{what}")
        unit.group.check_may_step()


# Per optimizer the state tensors that offload moved, by id, with the device where they were.
_moved: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[torch.Tensor, torch.device]]]
_moved = weakref.WeakKeyDictionary()


def _move_state(
    optimizer: Optimizer, unit: Unit, location: MemoryLocation | None
) -> list[torch.Tensor]:
    """Start moving the optimizer state of a unit's parameters; return the tensors it was in.

    Args:
        optimizer: The owner of the state.
        unit: A unit with parameters.
        location: None: back to where each tensor was.
    """
    assert unit.group is not None
    device = unit.group.spec.device
    moved = _moved.setdefault(optimizer, {})
    sources = []
    for param in unit.group.params:
        for tensor in _tensors_in(optimizer.state.get(param.sharded)):
            is_sharded = isinstance(tensor, DTensor)
            local = local_of(tensor) if is_sharded else tensor
            if location is not None:
                if id(tensor) in moved or local.device != device:
                    continue  # moved already, or on the host anyway, like AdamW's step count
                moved[id(tensor)] = (tensor, local.device)
                target = location
            elif id(tensor) in moved:
                target = MemoryLocation(moved.pop(id(tensor))[1])
            elif is_sharded and local.device != device:
                target = MemoryLocation(device)  # state that was loaded meanwhile
            else:
                continue
            new = target.empty_like(local)
            new.copy_(local.detach(), non_blocking=True)
            sources.append(local.data)
            if is_sharded:
                move_local(tensor, new)
            else:
                tensor.data = new
    return sources


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


def _synchronize(units: list[Unit]) -> None:
    """Wait until the work that was queued on the current stream is done."""
    for unit in units:
        if unit.group is not None:
            unit.group.comm.record().synchronize()


def _release_memory(units: list[Unit]) -> None:
    """Release freed blocks of the caching allocator, for other processes."""
    for kind in {unit.group.spec.device.type for unit in units if unit.group is not None}:
        if kind != "cpu":
            torch.get_device_module(kind).empty_cache()
