"""The ``.grad`` of sharded parameters, on the device or in host memory.

A reduction returns one flat tensor per unit in the accumulate dtype. If ``.grad`` is None, it
becomes a view of the flat tensor, or a copy if its dtype is another (that of the parameter, unless
``grad_dtype`` says otherwise). If ``.grad`` is set, even by the user, the result is added to it.

A forward computes with unsharded parameters, so autograd runs no hooks on sharded ones. The code
here runs the hooks that users register on sharded parameters (``register_hook``,
``register_post_accumulate_grad_hook``). If a loss itself uses one, autograd runs its hooks too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from meshard._comm.communicator import Handle
from meshard._comm.gradient_buffer import FlatGradients
from meshard._params.storage import MemoryLocation
from meshard._params.unit_params import UnitParams
from meshard._torch.dtensor import (
    gradient_dtype,
    is_placed_like,
    local_of,
    move_local,
    place_like,
)
from meshard._torch.private import accumulation_hooks_of, gradient_hooks_of, without_torch_function

_GRAD = attrgetter("grad")


@contextlib.contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


_NO_CONTEXT = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Return a context without grad and without inference mode.

    If both are off already, the context does nothing: ``torch.no_grad()`` would cost a dozen calls.
    """
    if torch.is_inference_mode_enabled():
        return _outside_of_inference()
    return torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT


class ShardedGrads:
    """The ``.grad`` of the sharded parameters of one unit."""

    # False if gradients in a host buffer wait for ``settle`` to add them to ``.grad``.
    are_shown = True

    def __init__(self, unit_params: UnitParams) -> None:
        self._unit_params = unit_params

    def publish(self, new: FlatGradients) -> Handle | None:
        """Add reduced gradients to ``.grad``, which may become views of ``new``.

        Returns the copy to host memory, if there is one. The caller must wait for the copy.
        """
        self._add(new)
        return None

    def settle(self) -> None:
        """Wait until ``.grad`` has all gradients. On the device it has them at once."""

    def drop_arriving(self, gone: frozenset[int]) -> None:
        """Drop gradients of some parameters that ``settle`` would add. On the device: none."""

    def _add(self, new: FlatGradients) -> None:
        shards, grads, before, after = self._inspect()
        sums, added = list[torch.Tensor](), list[torch.Tensor]()
        for index, local in new.shards(self._unit_params.spec.mesh_info.shard_rank):
            sharded, old = shards[index], grads[index]
            if hooks := before[index]:
                _run_hooks(tuple(hooks.values()), sharded, local)
            if old is None:
                sharded.grad = place_like(sharded, local.to(gradient_dtype(sharded)))
                continue
            if not is_placed_like(old, sharded):  # such as from a loss that used the shard itself
                old = sharded.grad = old.redistribute(sharded.device_mesh, sharded.placements)
            sums.append(local_of(old))
            added.append(local)
        if sums:
            torch._foreach_add_(sums, added)
        for index in sorted(new.used) if any(after) else ():
            for hook in tuple((after[index] or {}).values()):
                hook(shards[index])

    def _add_unread(self, new: FlatGradients) -> bool:
        """Make every ``.grad`` a view of ``new``, if possible. Return whether it was.

        The values of ``new`` are still being copied, so no hook, sum or cast may have to read them.
        """
        shards, grads, before, after = self._inspect()
        is_read = any(before) or any(after) or any(grad is not None for grad in grads)
        dtype = new.flat.dtype
        if is_read or any(gradient_dtype(shards[index]) != dtype for index in new.used):
            return False
        self._add(new)
        return True

    def _inspect(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Return four parallel lists: parameters, their ``.grad``, and their hooks.

        First the hooks of ``register_hook``, then of ``register_post_accumulate_grad_hook``.
        """
        shards: list[Any] = [param.sharded for param in self._unit_params.params]
        with without_torch_function():
            grads = list(map(_GRAD, shards))
            before = list(map(gradient_hooks_of, shards))
            after = list(map(accumulation_hooks_of, shards))
        return shards, grads, before, after

    def move(self, location: MemoryLocation) -> list[torch.Tensor]:
        """Start moving every ``.grad`` to ``location``. The ``.grad`` objects stay the same.

        Returns the old local tensors. The caller must keep them until the copies are over.
        """
        sources = list[torch.Tensor]()
        for param in self._unit_params.params:
            gradient = param.sharded.grad
            if gradient is not None:
                local = local_of(gradient)
                new = location.empty_like(local)
                new.copy_(local, non_blocking=True)
                move_local(gradient, new)
                sources.append(local)
        return sources


def _run_hooks(
    hooks: tuple[Callable[[Any], Any], ...], sharded: torch.Tensor, local: torch.Tensor
) -> None:
    """Run the hooks of ``register_hook``, which may change or replace the gradient ``local``."""
    # Pass a copy, because a hook may keep the tensor that it gets.
    gradient: torch.Tensor = place_like(sharded, local.to(gradient_dtype(sharded), copy=True))
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    local.copy_(local_of(gradient))


class HostGrads(ShardedGrads):
    """The ``.grad`` of the sharded parameters of one unit, in host memory.

    Reduced gradients are copied to a host buffer while the backward goes on. If possible, ``.grad``
    become views of the buffer at once, and ``settle`` only waits for the copies. Otherwise (for
    example, ``.grad`` is set already) ``settle`` also adds the buffer to ``.grad``.
    """

    def __init__(self, unit_params: UnitParams) -> None:
        super().__init__(unit_params)
        assert unit_params.host_copies is not None
        self._host_copies = unit_params.host_copies
        self._arriving: FlatGradients | None = None  # in a host buffer, to be added to .grad

    @property
    def are_shown(self) -> bool:  # type: ignore[override]  # of a constant
        """Whether ``.grad`` is complete once the copies to host memory are over."""
        return self._arriving is None

    def publish(self, new: FlatGradients) -> Handle:
        """Start copying reduced gradients to the host. ``.grad`` is valid after ``settle``.

        **Stream:** ``CommStream.HOST``. **Lifetime:** the result keeps ``new`` alive until its
        wait.
        """
        comm, label = self._unit_params.comm, self._unit_params.label
        if self._arriving is not None:
            self.settle()  # so that host buffers of several backwards do not pile up
        # New memory each time, because the user may still hold the last ``.grad``. torch caches
        # pinned memory, so later steps mostly make no driver calls.
        host = self._unit_params.spec.location.empty_like(new.flat)
        copying = self._host_copies.store(host, new.flat, comm, label=label)
        arriving = new._replace(flat=host)
        if not self._add_unread(arriving):
            self._arriving = arriving
        return copying

    def settle(self) -> None:
        """Wait for all copies, and add what they brought to ``.grad``. Blocks the host."""
        self._host_copies.wait()
        if self._arriving is not None:
            arrived, self._arriving = self._arriving, None
            with unrecorded():  # an evaluation calls this too, perhaps under inference_mode
                self._add(arrived)

    def drop_arriving(self, gone: frozenset[int]) -> None:
        """Wait for copies in flight. Drop what ``settle`` would add to ``.grad`` of ``gone``."""
        self._host_copies.wait()
        if self._arriving is not None:
            self._arriving = self._arriving.without(gone)
