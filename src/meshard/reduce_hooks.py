"""What may a user do to gradients on their way?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshard._runtime.unit import ReduceHook, Unit, units_in


class ReduceHookHandle:
    """Takes a hook off again.

    Args:
        units: Where it was put.
        hook: The hook.
    """

    def __init__(self, units: list[Unit], hook: ReduceHook) -> None:
        self._lists = [unit.settings.reduce_hooks for unit in units]
        self._hook = hook

    def remove(self) -> None:
        """Take the hook off every unit; nothing happens the second time."""
        for hooks in self._lists:
            if self._hook in hooks:
                hooks.remove(self._hook)


def register_reduce_hook(
    module: nn.Module, hook: ReduceHook, *, recurse: bool = True
) -> ReduceHookHandle:
    """Have ``hook`` see, and change, the gradients of every reduction.

    Hooks form a chain around the reduction: ``before`` runs in the order of registration, ``after``
    in the opposite order. **Collective:** reductions happen in the same order on all ranks, so a
    hook may communicate, if it does so on every rank. **Stream:** the current one.

    Args:
        module: A module with units in it.
        hook: An object with ``before(whole)`` and ``after(shard)``. ``before`` gets the whole
            gradients of a unit ``[shard_count, shard_numel]``, in the order of the wire and before
            any division; ``after`` gets what is about to be added to ``.grad``, ``[shard_numel]``,
            in ``accumulate_dtype``, once per window. Both change the tensor in place and must not
            keep it. A slot of negative zeros has no gradient on this rank.
        recurse: Also for the units inside.

    Returns:
        A handle whose ``remove()`` takes the hook off.

    Raises:
        TypeError: ``hook`` lacks one of the methods.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> class Halve:
    ...     def before(self, whole): ...
    ...     def after(self, shard):
    ...         shard.mul_(0.5)
    >>> layer = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> handle = meshard.register_reduce_hook(layer, Halve())
    >>> layer(torch.ones(1, 1)).sum().backward()
    >>> layer.bias.grad.full_tensor()
    tensor([0.5000])
    >>> handle.remove()
    """
    for name in ("before", "after"):
        if not callable(getattr(hook, name, None)):
            raise TypeError(f"a reduce hook needs a method {name}(tensor), got {hook!r}.")
    units = list(units_in(module))
    if not recurse:
        units = units[:1] if isinstance(vars(module).get("_meshard_unit"), Unit) else []
    if not units:
        raise ValueError(
            f"there is no unit in this {type(module).__name__}; apply fully_shard first."
        )
    for unit in units:
        unit.settings.reduce_hooks.append(hook)
    return ReduceHookHandle(units, hook)


class WireRounding:
    """A reduce hook that rounds gradients to a narrower dtype before they are sent.

    Like ``reduce_dtype`` in its numbers, but set at any time; the bytes stay those of
    ``reduce_dtype``. For trying out whether a model bears a narrower wire.

    Args:
        dtype: Such as ``torch.bfloat16``.

    >>> rounded = torch.tensor([[1.0009765625]])
    >>> WireRounding(torch.bfloat16).before(rounded)
    >>> rounded
    tensor([[1.]])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def before(self, whole: torch.Tensor) -> None:
        """Round in place."""
        whole.copy_(whole.to(self._dtype))

    def after(self, shard: torch.Tensor) -> None:
        """Leave what was reduced alone."""


class DropRanks:
    """A reduce hook that leaves out ranks whose loss is not finite, and renormalises.

    Call ``decide(loss)`` on every rank after forward and before backward; the gradients of the rest
    are then averaged over the rest. If no rank is left, gradients are zero.

    Args:
        all_reduce: Sums a tensor over all ranks in place: ``torch.distributed.all_reduce``.

    >>> drop = DropRanks(lambda flag: None)  # one rank
    >>> drop.decide(torch.tensor(float("nan")))
    >>> gradient = torch.full((1, 2), float("nan"))
    >>> drop.before(gradient)
    >>> gradient
    tensor([[0., 0.]])
    """

    def __init__(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        self._all_reduce = all_reduce
        self._is_good = True
        self._factor = torch.ones(())

    def decide(self, loss: torch.Tensor) -> None:
        """Leave this rank out if ``loss`` is not finite. **Collective:** all ranks."""
        good = torch.isfinite(loss.detach()).all()
        counts = torch.stack([good.float(), torch.ones_like(good, dtype=torch.float32)])
        self._is_good = bool(good)
        self._all_reduce(counts)
        self._factor = counts[1] / counts[0].clamp(min=1.0)

    def before(self, whole: torch.Tensor) -> None:
        """Contribute nothing from this rank, if it is left out."""
        if not self._is_good:
            whole.zero_()  # not times zero, which keeps a NaN

    def after(self, shard: torch.Tensor) -> None:
        """Average over the ranks that are left."""
        shard.mul_(self._factor.to(shard.device))


class AllReduceHook:
    """What FSDP2 calls an all-reduce hook, as a part of the chain of reduce hooks.

    Args:
        hook: Changes the flat shard in place.
        stream: Where it runs; None: on the current stream.
    """

    def __init__(self, hook: Callable[[torch.Tensor], None], stream: Any) -> None:
        self._hook = hook
        self._stream = stream

    def before(self, whole: torch.Tensor) -> None:
        """Leave whole gradients alone."""

    def after(self, shard: torch.Tensor) -> None:
        """Call the hook; the current stream waits for it."""
        if self._stream is None:
            self._hook(shard)
            return
        device_module = torch.get_device_module(shard.device)
        self._stream.wait_stream(device_module.current_stream())
        with device_module.stream(self._stream):
            self._hook(shard)
        device_module.current_stream().wait_stream(self._stream)
