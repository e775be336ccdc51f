"""Hooks that see, and change, gradients while they are reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshard._engine.unit import Unit, require_units
from meshard._gradients.accumulator import ReduceHook
from meshard.policies import check_can_be_added


class ReduceHookHandle:
    """The registration of a hook, which ``remove`` undoes."""

    def __init__(self, units: list[Unit], registration: ReduceHook) -> None:
        self._lists = [unit.settings.reduce_hooks for unit in units]
        self._registration = registration

    def remove(self) -> None:
        """Take the hook off every unit. Calling it again does nothing."""
        for hooks in self._lists:
            hooks[:] = [other for other in hooks if other is not self._registration]


def register_reduce_hook(
    module: nn.Module,
    hook: object = None,
    *,
    wire_dtype: torch.dtype | None = None,
    recurse: bool = True,
) -> ReduceHookHandle:
    """Register ``hook`` on the reduction of gradients, or send them in ``wire_dtype``, or both.

    A hook has at least one of these methods, which change their tensor in place and must not keep
    it. ``remove()`` of the returned handle undoes the call.

    * ``arrived(unsharded)``: the unsharded gradients of one backward of one unit,
      ``[shard_count, shard_numel]``, before they are added to anything. Called per microbatch,
      and once more, with zeros, if what is pending is reduced without new gradients.
    * ``before(unsharded)``: the gradients about to be sent, of the same shape, before any division.
    * ``after(shard)``: the reduced gradients about to be added to ``.grad``, ``[shard_numel]`` in
      ``accumulate_dtype``.

    ``arrived`` and ``before`` run in the order of registration, ``after`` in the opposite order.
    **Collective:** hooks run in the same order on all ranks, so they may communicate. **Stream:**
    the current one.

    Args:
        module: A module with units, or a unit.
        hook: An object with the methods above. None: only ``wire_dtype`` is registered.
        wire_dtype: The dtype in which gradients are sent, instead of ``reduce_dtype``. The bytes
            sent and the results are the same as with ``reduce_dtype=wire_dtype``: sums are still
            added up in ``accumulate_dtype``. Of several registrations, the first dtype counts.
        recurse: Also register on the units inside ``module``.

    Raises:
        TypeError: ``hook`` has none of the methods; or, in backward, one of them returns something.
        ValueError: There is no unit in ``module``, or ``wire_dtype`` has fewer than 16 bits.

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
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise TypeError(f"wire_dtype must be a torch.dtype or None, got {wire_dtype!r}.")
    check_can_be_added("wire_dtype", wire_dtype)
    parts = ("arrived", "before", "after")
    methods = {part: found for part in parts if (found := getattr(hook, part, None)) is not None}
    if not methods and (hook is not None or wire_dtype is None):
        raise TypeError(
            f"a reduce hook needs a method arrived, before or after, got {hook!r}; to send "
            "gradients in another dtype, pass wire_dtype."
        )
    for part, method in methods.items():
        if not callable(method):
            raise TypeError(f"{part} of a reduce hook must be a method, got {method!r}.")
    registration = ReduceHook(**methods, wire_dtype=wire_dtype)
    units = require_units(module, recurse=recurse)
    for unit in units:
        unit.settings.reduce_hooks.append(registration)
    return ReduceHookHandle(units, registration)


def on_stream(
    hook: Callable[[torch.Tensor], None], stream: torch.Stream
) -> Callable[[torch.Tensor], None]:
    """Return a function that runs ``hook`` on ``stream``; the current stream waits for it."""

    def run(shard: torch.Tensor) -> None:
        device_module = torch.get_device_module(shard.device)
        stream.wait_stream(device_module.current_stream())
        with device_module.stream(stream):
            hook(shard)
        device_module.current_stream().wait_stream(stream)

    return run
