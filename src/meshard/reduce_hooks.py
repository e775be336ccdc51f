"""Hooks that see, and change, gradients while they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshard._engine.unit import Unit, require_units
from meshard._gradients.settings import ReduceHook
from meshard.policies import check_can_be_added


class ReduceHookHandle:
    """Removes a hook from the units that it was registered on."""

    def __init__(self, units: list[Unit], registration: ReduceHook) -> None:
        self._lists = [unit.settings.reduce_hooks for unit in units]
        self._registration = registration

    def remove(self) -> None:
        """Take the hook off every unit. Calling it again does nothing."""
        for hooks in self._lists:
            hooks[:] = [other for other in hooks if other is not self._registration]


def register_reduce_hook(
    module: nn.Module, hook: object, *, recurse: bool = True
) -> ReduceHookHandle:
    """Register ``hook`` on the reduction of gradients.

    A hook has at least one of these methods, which change their tensor in place and must not keep
    it; an attribute ``wire_dtype`` sets the dtype in which gradients are sent. ``remove()`` of what
    is returned takes it off.

    * ``arrived(unsharded)``: the unsharded gradients of one backward of one unit,
      ``[shard_count, shard_numel]``, before they are added to anything. Called per microbatch.
    * ``before(unsharded)``: what is about to be sent, of the same shape, before any division.
    * ``after(shard)``: what is about to be added to ``.grad``, ``[shard_numel]`` in
      ``accumulate_dtype``.

    Hooks form a chain: ``after`` runs in the opposite order of registration. **Collective:** hooks
    run in the same order on all ranks, so they may communicate. **Stream:** the current one.

    Raises:
        TypeError: ``hook`` has none of the methods; or, in backward, one of them returns something.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> class Halve:
    ...     def after(self, shard):
    ...         shard.mul_(0.5)
    >>> layer = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> handle = meshard.register_reduce_hook(layer, Halve())
    >>> layer(torch.ones(1, 1)).sum().backward()
    >>> layer.bias.grad.full_tensor()
    tensor([0.5000])
    """
    parts = ("arrived", "before", "after", "wire_dtype")
    given: dict[str, Any] = {part: getattr(hook, part, None) for part in parts}
    registration = ReduceHook(**given)
    if not any(given.values()):
        raise TypeError(
            f"a reduce hook needs a method arrived, before or after, or a wire_dtype; got {hook!r}."
        )
    for part in parts[:-1]:
        if given[part] is not None and not callable(given[part]):
            raise TypeError(f"{part} of a reduce hook must be a method, got {given[part]!r}.")
    if registration.wire_dtype is not None and not isinstance(registration.wire_dtype, torch.dtype):
        raise TypeError(f"wire_dtype must be a torch.dtype, got {registration.wire_dtype!r}.")
    check_can_be_added("wire_dtype", registration.wire_dtype)
    units = require_units(module, recurse=recurse)
    for unit in units:
        unit.settings.reduce_hooks.append(registration)
    return ReduceHookHandle(units, registration)


class WireCompression:
    """A reduce hook that sends gradients in a narrower dtype.

    Bytes and numbers are those of ``reduce_dtype=dtype``, but a hook can be added and removed
    between steps. Sums are still added up in ``accumulate_dtype``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> handle = meshard.register_reduce_hook(layer, WireCompression(torch.bfloat16))
    >>> layer(torch.tensor([[1.0009765625]])).sum().backward()
    >>> layer.weight.grad.full_tensor()
    tensor([[1.]])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}.")
        self.wire_dtype = dtype


def on_stream(
    hook: Callable[[torch.Tensor], None], stream: torch.Stream
) -> Callable[[torch.Tensor], None]:
    """Return ``hook`` run on ``stream``, which the current stream waits for."""

    def run(shard: torch.Tensor) -> None:
        device_module = torch.get_device_module(shard.device)
        stream.wait_stream(device_module.current_stream())
        with device_module.stream(stream):
            hook(shard)
        device_module.current_stream().wait_stream(stream)

    return run
