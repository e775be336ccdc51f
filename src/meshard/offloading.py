"""What lives in host memory: always, by policy, or for a phase in which the model rests?"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._engine.unit import Unit, units_or_raise
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._params.storage import MemoryLocation
from meshard._params.subclass_params import check_not_subclass
from meshard._torch.dtensor import local_of, move_local
from meshard.optim.flat import forget_slices

_has_warned = False


def host_for(
    policy: TorchOffloadPolicy, device: torch.device, subclass_fqns: Sequence[str] = ()
) -> MemoryLocation | None:
    """Return the host memory in which a policy wants shards; None: they stay on ``device``.

    Args:
        policy: meshard's or torch's.
        device: The device of the mesh.
        extended: Names of parameters that say themselves what is gathered of them.

    Raises:
        NotImplementedError: There are such parameters.
        TypeError: ``pin_memory`` is not a bool.
        ValueError: ``step_device`` is neither the host nor ``device``.
    """
    global _has_warned
    if not isinstance(policy, TorchCPUOffloadPolicy):
        return None
    if not isinstance(policy.pin_memory, bool):
        raise TypeError(f"pin_memory must be a bool, got {policy.pin_memory!r}.")
    if subclass_fqns:
        raise NotImplementedError(
            f"CPUOffloadPolicy for parameter {subclass_fqns[0]!r} is not built yet, because it has "
            "fsdp_pre_all_gather; leave offload_policy out for its module."
        )
    step_device = torch.device(getattr(policy, "step_device", "cpu"))
    if step_device.type not in ("cpu", device.type):
        raise ValueError(
            f"CPUOffloadPolicy(step_device={str(step_device)!r}) is neither 'cpu' nor the device "
            f"of the mesh, {device.type!r}, which are where a unit can be stepped."
        )
    host = MemoryLocation.host_memory(device, pin=policy.pin_memory)
    if step_device.type != "cpu":
        host = replace(host, step_device=device)
    if policy.pin_memory and not host.is_pinned and not _has_warned:
        _has_warned = True
        warnings.warn(
            f"CPUOffloadPolicy(pin_memory=True): the mesh is on {device.type!r}, so there is no "
            "device to copy to and host memory is not pinned; pass pin_memory=False.",
            stacklevel=3,
        )
    return host


class Offloaded:
    """A model that rests in host memory. As a context manager, it comes back at the end.

    Args:
        module: What was offloaded.
        optimizer: Whose state was offloaded with it.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._module = module
        self._optimizer = optimizer

    def __enter__(self) -> None:
        """Do nothing: it is offloaded already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Bring it back, also after an exception."""
        onload(self._module, self._optimizer)


def offload(module: nn.Module, optimizer: Optimizer | None = None) -> Offloaded:
    """Move all shards, gradients and optimizer state to the host, until ``onload``.

    For a phase in which something else needs the device: generation between two phases of
    training, say. Parameters, gradients and state tensors stay the same objects, so whoever holds
    them, like the optimizer, need not know. The device's memory is free when this returns. State
    dicts may be read and loaded meanwhile; a forward raises. Ranks need not agree: nothing is
    communicated. Buffers, ``ignored_params`` and their state stay where they are.

    Args:
        module: A module with units in it, usually the root. Units that a ``CPUOffloadPolicy``
            keeps on the host are left alone.
        optimizer: Also move its state for the parameters of ``module``.

    Returns:
        A context manager that calls ``onload`` at its end; ignore it to call ``onload`` yourself.

    Raises:
        NotImplementedError: A parameter has ``fsdp_pre_all_gather``.
        RuntimeError: A forward or backward is under way, or gradients are accumulated that are
            not in ``.grad``.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> with meshard.offload(layer, optimizer):
    ...     pass  # the device is free
    >>> layer(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    _move(module, optimizer, away=True)
    return Offloaded(module, optimizer)


def onload(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Undo ``offload``: bring shards, gradients and optimizer state back to the device.

    Training goes on bit for bit as if they had never left. Does nothing where nothing is away.

    Args:
        module: What was passed to ``offload``.
        optimizer: Likewise.

    Raises:
        RuntimeError: A forward or backward is under way.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> _ = meshard.offload(layer)
    >>> meshard.onload(layer)
    """
    _move(module, optimizer, away=False)


def _move(module: nn.Module, optimizer: Optimizer | None, *, away: bool) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an Optimizer or None, got {type(optimizer).__name__}.")
    units = units_or_raise(module)
    for unit in units:
        _check_rests(unit, "offload" if away else "onload")
    forget_slices()
    sources: list[torch.Tensor] = []  # of copies that may still be on their way
    for unit in units:
        group, gradients = unit.group, unit.gradients
        if group is None or gradients is None or group.spec.host is not None:
            continue
        location = MemoryLocation.host_memory(group.spec.device, pin=True) if away else None
        if group.tensors.is_offloaded is not away:
            group.reshard()
            group.adopt_edits()
            sources.append(group.tensors.move(location))
            assert isinstance(gradients.sharded, ShardedGrads)
            sources += gradients.sharded.move(location or group.spec.location)
        if optimizer is not None:
            sources += _move_state(optimizer, unit, location)
    _synchronize(units)
    del sources
    _release_memory(units)


def _check_rests(unit: Unit, what: str) -> None:
    if not unit.lifecycle.is_between_steps():
        raise RuntimeError(
            f"meshard.{what} was called inside the forward or backward of unit {unit.label!r}; "
            "call it between steps."
        )
    if unit.group is not None:
        unit.group.adopt_edits()
        check_not_subclass(unit.group.tensors, f"meshard.{what}")
        unit.group.check_may_step()


# What offload has moved, per optimizer, and where it was.
_moved: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[torch.Tensor, torch.device]]]
_moved = weakref.WeakKeyDictionary()


def _move_state(
    optimizer: Optimizer, unit: Unit, location: MemoryLocation | None
) -> list[torch.Tensor]:
    """Move the state of a unit's parameters to ``location``; None: back. Return what it was in."""
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
                    continue  # it is there, or lives on the host anyway, like AdamW's step count
                moved[id(tensor)] = (tensor, local.device)
                target = location
            elif id(tensor) in moved:
                target = MemoryLocation(moved.pop(id(tensor))[1])
            elif is_sharded and local.device != device:
                target = MemoryLocation(device)  # loaded meanwhile
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
    """Wait until everything that was queued on the current stream is over."""
    for unit in units:
        if unit.group is not None:
            unit.group.comm.record().synchronize()


def _release_memory(units: list[Unit]) -> None:
    """Hand what has become free back to the device, for other processes."""
    for kind in {unit.group.spec.device.type for unit in units if unit.group is not None}:
        if kind != "cpu":
            torch.get_device_module(kind).empty_cache()
