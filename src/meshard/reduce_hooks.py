"""What may a user do to gradients on their way?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshard._engine.unit import ReduceHook, Unit, units_or_raise


class ReduceHookHandle:
    """Takes a hook off again.

    Args:
        units: Where it was put.
        registration: What was put there.
    """

    def __init__(self, units: list[Unit], registration: ReduceHook) -> None:
        self._lists = [unit.settings.reduce_hooks for unit in units]
        self._registration = registration

    def remove(self) -> None:
        """Take the hook off every unit; nothing happens the second time."""
        for hooks in self._lists:
            hooks[:] = [other for other in hooks if other is not self._registration]


def register_reduce_hook(
    module: nn.Module, hook: object, *, recurse: bool = True
) -> ReduceHookHandle:
    """Have ``hook`` see, and change, gradients on their way.

    A hook is an object with at least one of these methods. Each changes its tensor in place,
    returns nothing, and must not keep the tensor:

    * ``arrived(whole)``: the whole gradients of one backward of one unit on this rank,
      ``[shard_count, shard_numel]`` in the order of the wire, before they are added to anything.
      Called once per unit and microbatch, under every ``GradientSync``.
    * ``before(whole)``: what is about to be sent, of the same shape, before any division. Called
      once per reduction; not at all under ``GradientSync.NONE``.
    * ``after(shard)``: what is about to be added to ``.grad``, ``[shard_numel]`` in
      ``accumulate_dtype``. Called once per window on a 2D mesh; on a 1D mesh once per reduction.

    An attribute ``wire_dtype`` sets the dtype in which gradients are sent.

    Hooks form a chain: ``arrived`` and ``before`` run in the order of registration, ``after`` in
    the opposite order. A reduction keeps the hooks that it started with. **Collective:** all of
    this happens in the same order on all ranks, so a hook may communicate, if it does so on every
    rank. **Stream:** the current one.

    Args:
        module: A module with units in it.
        hook: The object with the methods.
        recurse: Also for the units inside.

    Returns:
        A handle whose ``remove()`` takes the hook off.

    Raises:
        TypeError: ``hook`` has none of the methods; or one of them returns something, then in
            backward.
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
    >>> handle.remove()
    """
    registration = ReduceHook(
        arrived=getattr(hook, "arrived", None),
        before=getattr(hook, "before", None),
        after=getattr(hook, "after", None),
        wire_dtype=getattr(hook, "wire_dtype", None),
    )
    if registration.is_idle:
        raise TypeError(
            f"a reduce hook needs a method arrived, before or after, or a wire_dtype; got {hook!r}."
        )
    units = units_or_raise(module, recurse=recurse)
    for unit in units:
        unit.settings.reduce_hooks.append(registration)
    return ReduceHookHandle(units, registration)


class WireCompression:
    """A reduce hook that sends gradients in a narrower dtype.

    The bytes and the numbers are those of ``reduce_dtype=dtype``, but a hook can be put on and
    taken off between steps. Sums are added up in ``accumulate_dtype`` all the same.

    Args:
        dtype: Such as ``torch.bfloat16``.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.

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


class DropRanks:
    """A reduce hook that leaves out ranks whose loss is not finite, and renormalises.

    Call ``decide(loss)`` on every rank after forward and before backward of each microbatch; its
    gradients are then averaged over the ranks that are left, under every ``GradientSync``. If no
    rank is left, the microbatch counts as zero.

    Args:
        all_reduce: Sums a tensor over all ranks in place: ``torch.distributed.all_reduce``.

    >>> drop = DropRanks(lambda flag: None)  # one rank
    >>> drop.decide(torch.tensor(float("nan")))
    >>> gradient = torch.full((1, 2), float("nan"))
    >>> drop.arrived(gradient)
    >>> gradient
    tensor([[0., 0.]])
    """

    def __init__(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        self._all_reduce = all_reduce
        self._is_good = True
        self._factor = 1.0

    def decide(self, loss: torch.Tensor) -> None:
        """Leave this rank out if ``loss`` is not finite. Waits for the answer.

        **Collective:** all ranks.
        """
        good = torch.isfinite(loss.detach()).all()
        counts = torch.stack([good.float(), torch.ones_like(good, dtype=torch.float32)])
        self._is_good = bool(good)
        self._all_reduce(counts)
        num_good, num_ranks = counts.tolist()
        self._factor = num_ranks / max(num_good, 1.0)

    def arrived(self, unsharded: torch.Tensor) -> None:
        """Contribute nothing from this rank if it is left out, and more if others are."""
        if not self._is_good:
            unsharded.zero_()  # not times zero, which keeps a NaN
        elif self._factor != 1.0:
            unsharded.mul_(self._factor)


class OnStream:
    """An all-reduce hook as FSDP2 has it, run on a stream of its own.

    Args:
        hook: Changes the flat shard in place.
        stream: Where it runs; the current stream waits for it.
    """

    def __init__(self, hook: Callable[[torch.Tensor], None], stream: torch.Stream) -> None:
        self._hook = hook
        self._stream = stream

    def __call__(self, shard: torch.Tensor) -> None:
        """Call the hook."""
        device_module = torch.get_device_module(shard.device)
        self._stream.wait_stream(device_module.current_stream())
        with device_module.stream(self._stream):
            self._hook(shard)
        device_module.current_stream().wait_stream(self._stream)
