"""The ``.grad`` of sharded parameters, on the device or in host memory.

A reduction returns one flat tensor per unit in the accumulate dtype. If ``.grad`` is None, it
becomes a view of the flat tensor, or a copy if its dtype differs (that of the parameter, unless
``grad_dtype`` says otherwise). If ``.grad`` is set, even by the user, the result is added to it.

Autograd does not see sharded parameters in the forward of their unit. So this module runs the hooks
that users register on them (``register_hook``, ``register_post_accumulate_grad_hook``). If a loss
uses a sharded parameter outside of the forward, autograd runs its hooks too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from meshard._comm.communicator import RecordedWork
from meshard._comm.gradient_buffer import FlatGradients
from meshard._params.storage import MemoryLocation
from meshard._params.unit_params import UnitParams
from meshard._torch.dtensor import (
    gradient_dtype,
    is_placed_like,
    local_of,
    move_local,
    wrap_like,
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

    If both are off already, it does nothing, because ``torch.no_grad()`` costs a dozen calls.
    """
    if torch.is_inference_mode_enabled():
        return _outside_of_inference()
    return torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT


class ShardedGrads:
    """The ``.grad`` of the sharded parameters of one unit."""

    # Whether .grad has, or is a view of, all published gradients. If not, call ``settle``.
    are_shown = True

    def __init__(self, unit_params: UnitParams) -> None:
        self._unit_params = unit_params

    def publish(self, new: FlatGradients) -> RecordedWork | None:
        """Add reduced gradients to ``.grad``, which may become views of ``new``.

        Returns the copy to host memory, if any. The caller waits for it.
        """
        self._add(new)
        return None

    def settle(self) -> None:
        """Put all published gradients into ``.grad``."""

    def drop_arriving(self, gone: frozenset[int]) -> None:
        """Drop the published gradients of some parameters that are not in ``.grad`` yet."""

    def _add(self, new: FlatGradients) -> None:
        shards, grads, before, after = self._inspect()
        sums, added = list[torch.Tensor](), list[torch.Tensor]()
        for index, local in new.shards(self._unit_params.spec.mesh_info.shard_rank):
            sharded, old = shards[index], grads[index]
            if hooks := before[index]:
                _run_hooks(tuple(hooks.values()), sharded, local)
            if old is None:
                sharded.grad = wrap_like(sharded, local.to(gradient_dtype(sharded)))
                continue
            if not is_placed_like(old, sharded):  # such as that of a loss on shards
                old = sharded.grad = old.redistribute(sharded.device_mesh, sharded.placements)
            sums.append(local_of(old))
            added.append(local)
        if sums:
            torch._foreach_add_(sums, added)
        for index in sorted(new.used) if any(after) else ():
            for hook in tuple((after[index] or {}).values()):
                hook(shards[index])

    def _add_unread(self, new: FlatGradients) -> bool:
        """Publish ``new`` while its values are still being copied, if that reads no value.

        So all ``.grad`` must become views of it. Return whether ``new`` was published.
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

        Returns the old memory. The caller keeps it until the copies are over.
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
    # Pass a copy, because a hook may keep it.
    gradient: torch.Tensor = wrap_like(sharded, local.to(gradient_dtype(sharded), copy=True))
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    local.copy_(local_of(gradient))


class HostGrads(ShardedGrads):
    """The ``.grad`` of the sharded parameters of one unit, in host memory.

    A reduced gradient is copied to a host buffer while backward goes on. If possible, ``.grad``
    become views of the buffer at once (``_add_unread``), and ``settle`` only waits for the copies.
    Otherwise ``settle`` also adds the buffer to ``.grad``.
    """

    def __init__(self, unit_params: UnitParams) -> None:
        super().__init__(unit_params)
        assert unit_params.host_copies is not None
        self._host_copies = unit_params.host_copies
        self._arriving: FlatGradients | None = None  # in a buffer, and not in .grad yet

    @property
    def are_shown(self) -> bool:  # type: ignore[override]  # of a constant
        """Whether ``.grad`` will have all gradients as soon as ``HostCopies.wait`` returns."""
        return self._arriving is None

    def publish(self, new: FlatGradients) -> RecordedWork:
        """Add reduced gradients to ``.grad``. Their values are valid after ``settle``.

        **Stream:** ``CommStream.HOST``. **Lifetime:** the result keeps ``new`` alive until its
        wait.
        """
        comm, label = self._unit_params.comm, self._unit_params.label
        if self._arriving is not None:
            self.settle()  # so that buffers of several backwards do not pile up
        # New memory each time, because the user may still hold the last gradient. torch caches
        # pinned memory, so later steps make no driver calls.
        host = self._unit_params.spec.location.empty_like(new.flat)
        copying = self._host_copies.store(host, new.flat, comm, label=label)
        arriving = new._replace(flat=host)
        if not self._add_unread(arriving):
            self._arriving = arriving
        return copying

    def settle(self) -> None:
        """Wait for all copies, and put the gradients into ``.grad``. Blocks the host."""
        self._host_copies.wait()
        if self._arriving is not None:
            arrived, self._arriving = self._arriving, None
            with unrecorded():  # an evaluation calls this too, perhaps under inference_mode
                self._add(arrived)

    def drop_arriving(self, gone: frozenset[int]) -> None:
        """Wait for copies in flight, and drop the copied gradients of some parameters."""
        self._host_copies.wait()
        if self._arriving is not None:
            self._arriving = self._arriving.without(gone)
