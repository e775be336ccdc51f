"""The ``.grad`` of sharded parameters.

A reduction yields one flat tensor per unit in the accumulate dtype. Gradients of parameters of that
dtype are views of it, so that the next reduction is added by one kernel. Gradients of narrower
parameters are copies; the wide sums are kept beside them, because microbatches that are added up in
a narrow dtype round each other away.

Autograd never sees a sharded parameter, so hooks that users register on one
(``register_hook``, ``register_post_accumulate_grad_hook``) run from here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._params.sharded_param import UnitParam
from meshard._params.storage import MemoryLocation
from meshard._params.unit_params import UnitParams
from meshard._torch.dtensor import local_of, move_local, wrap_like
from meshard._torch.private import (
    accumulation_hooks_of,
    base_of,
    gradient_hooks_of,
    without_torch_function,
)

_OURS = "_meshard_published"  # an attribute of every .grad that was set here


def look_at(params: Sequence[UnitParam]) -> tuple[list[int], bool]:
    """Return the indices of parameters with hooks, and whether no parameter has a gradient."""
    hooked, has_none = [], True
    with without_torch_function():
        for index, param in enumerate(params):
            sharded = param.sharded
            if sharded.grad is not None:
                has_none = False
            if gradient_hooks_of(sharded) or accumulation_hooks_of(sharded):
                hooked.append(index)
    return hooked, has_none


def run_tensor_hooks(sharded: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
    """Run the hooks of ``register_hook`` on a copy of the gradient that is about to be added.

    Returns:
        The gradient that the hooks returned, as a DTensor; None if there is no such hook.
    """
    hooks = gradient_hooks_of(sharded)
    if not hooks:
        return None
    # A copy: a hook may keep it.
    grad: torch.Tensor = wrap_like(sharded, local.to(sharded.dtype, copy=True))
    for hook in tuple(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def run_post_hooks(sharded: torch.Tensor) -> None:
    """Run the hooks of ``register_post_accumulate_grad_hook``, after the gradient was added."""
    hooks = accumulation_hooks_of(sharded)
    for hook in tuple(hooks.values()) if hooks else ():
        hook(sharded)


class _Mark:
    """The mark of a ``.grad`` that was set here, with the wide sums that it is a copy of."""

    def __init__(self, wide: torch.Tensor | None) -> None:
        self._wide = wide  # they live as long as the gradient

    def __reduce__(self) -> Any:
        return bool, (True,)  # neither pickled nor copied with the gradient


_PLAIN = _Mark(None)


def mark_as_ours(gradient: torch.Tensor, wide: torch.Tensor | None = None) -> None:
    """Mark a ``.grad`` as set by meshard, a copy of ``wide`` unless it is a view of the sums."""
    setattr(gradient, _OURS, _PLAIN if wide is None else _Mark(wide))


def is_marked(gradient: torch.Tensor) -> bool:
    """Whether ``mark_as_ours`` marked this very object."""
    return hasattr(gradient, _OURS)


def is_clear(params: Sequence[UnitParam]) -> bool:
    """Whether no parameter has a gradient."""
    with without_torch_function():
        return all(param.sharded.grad is None for param in params)


def relaid(grads: FlatGradients, indices: tuple[int, ...]) -> FlatGradients:
    """Return ``grads`` in the layout of the parameters ``indices``."""
    if grads.layout.indices == indices:
        return grads
    layout = GradientLayout(grads.layout.params, indices, grads.layout.device)
    return FlatGradients(layout, grads.laid_out(layout), grads.used)


def take_edit(copy: torch.Tensor, wide: torch.Tensor) -> None:
    """Apply the user's edits of ``copy``, a copy of ``wide`` in a narrower dtype, to ``wide``."""
    # By value, because torch's foreach kernels on DTensors raise no version counter.
    wide.copy_(torch.where(copy == wide.to(copy.dtype), wide, copy.to(wide.dtype)))


def _no_flat() -> None:
    return None


class ShardedGrads:
    """The ``.grad`` of the sharded parameters of one unit.

    Args:
        storage: The parameters.
    """

    def __init__(self, storage: UnitParams) -> None:
        self._storage = storage
        self._published = None  # while every .grad is as it was set here
        # The address of each .grad, by index. A weakref would forbid Module.to to swap the tensor,
        # and a reference would keep its memory.
        self._addresses: dict[int, int] = {}

    @property
    def _published(self) -> FlatGradients | None:
        """The flat sums that every ``.grad`` shows; None once these are cleared."""
        flat = self._flat()
        return None if flat is None else FlatGradients(self._layout, flat, self._used)

    @_published.setter
    def _published(self, grads: FlatGradients | None) -> None:
        self._flat: Callable[[], torch.Tensor | None] = _no_flat
        if grads is None:
            return
        self._layout, flat, self._used = grads
        if grads.used and base_of(flat) is None and self._storage.host_copies is None:
            # Every .grad holds the sums, which are free as soon as the user clears the last one.
            self._flat = weakref.ref(flat)
        else:
            self._flat = lambda: flat

    @property
    def has_arrivals(self) -> bool:
        """Whether the ``.grad`` of an unsharded parameter is a new gradient of autograd: always."""
        return True

    def free_bucket(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for unsharded gradients that is reused in every step: there is none."""
        return None

    # --- publication ------------------------------------------------------------------

    def publish(self, new: FlatGradients) -> None:
        """Add reduced gradients to ``.grad``. ``new`` may be kept, and written to later."""
        hooked, has_none = self._inspect(new)
        if hooked:
            self._run_tensor_hooks(new, hooked)
            has_none = is_clear(self._storage.params)
        published = self._published
        if published is None and has_none:
            self._set_all(new)
        elif published is not None and self._is_published(published, new):
            self._take_edits(published)
            published.flat.add_(new.flat)  # the range of a missing gradient is negative zero
            for grad, wide in self._copies(published):
                grad.copy_(wide)
            self._set_more(published, new.used)
        else:
            self._set_all(self._sum_with_foreign(new))
        for index in hooked:
            run_post_hooks(self._storage.params[index].sharded)

    def _sum_with_foreign(self, new: FlatGradients) -> FlatGradients:
        """Add ``.grad`` to ``new`` where the user replaced some, or froze parameters since."""
        for index, local in self._locals(new):
            old = self._grad(index)
            if old is not None and not self._is_ours(index):
                local.add_(old)  # the user's own gradient is taken over by value
        if self._published is not None:
            self._take_edits(self._published)
            gone = frozenset(index for index in self._published.used if not self._is_ours(index))
            published = self._published._replace(used=self._published.used - gone)
            if gone:
                # In a copy: the user may still hold a tensor that is not in .grad any more.
                published = published._replace(flat=published.flat.clone())
                published._replace(used=gone).erase(gone)
            indices = tuple(sorted({*published.layout.indices, *new.layout.indices}))
            new, published = relaid(new, indices), relaid(published, indices)
            new.flat.add_(published.flat)
            new = new._replace(used=new.used | published.used)
        return new

    def _set_all(self, grads: FlatGradients) -> None:
        self._published = grads
        self._addresses = {index: self._set(index, local) for index, local in self._locals(grads)}

    def _set_more(self, published: FlatGradients, used: frozenset[int]) -> None:
        """Set ``.grad`` of the parameters in ``used`` that had none."""
        self._published = published._replace(used=published.used | used)
        if used <= published.used:
            return
        for index, local in self._locals(self._published):
            if index not in published.used:
                self._addresses[index] = self._set(index, local)

    def _set(self, index: int, local: torch.Tensor) -> int:
        """Make ``local`` the ``.grad`` of a parameter; return its address."""
        sharded = self._storage.params[index].sharded
        wide = None
        if local.dtype != sharded.dtype:
            wide, local = local, local.to(sharded.dtype)
        sharded.grad = gradient = wrap_like(sharded, local)
        mark_as_ours(gradient, wide)
        return local.data_ptr()

    # --- gradients that are in .grad --------------------------------------------------

    def settle(self) -> None:
        """Put everything that was added into ``.grad``."""

    def show_early(self) -> bool:
        """Put everything into ``.grad``, where its values may still be on their way."""
        return True

    def release_cleared(self) -> None:
        """Drop the flat sums once the user has cleared every ``.grad``."""
        if self._published is not None and is_clear(self._storage.params):
            self._published = None

    def forget(self, indices: frozenset[int]) -> None:
        """Drop what is kept for parameters whose ``.grad`` was cleared."""
        self.release_cleared()

    def clear(self) -> None:
        """Clear every ``.grad``."""
        for param in self._storage.params:
            param.sharded.grad = None
        self._published = None

    def move(self, location: MemoryLocation) -> list[torch.Tensor]:
        """Start moving every ``.grad`` to ``location``. The ``.grad`` objects stay the same.

        Returns:
            The old memory, to be kept until the copies are over.
        """
        published, views = self._published, dict[int, torch.Tensor]()
        if published is not None and self._addresses != self._addresses_of(published):
            published = None
        if published is not None:
            flat = location.empty_like(published.flat)
            flat.copy_(published.flat, non_blocking=True)
            moved = published._replace(flat=flat)
            views = dict(self._locals(moved))
        sources = [] if published is None else [published.flat]
        for index, param in enumerate(self._storage.params):
            gradient, local = param.sharded.grad, self._grad(index)
            if gradient is None or local is None:
                continue
            new = views.get(index)
            if new is None or new.dtype != local.dtype:
                new = location.empty_like(local)
                new.copy_(local, non_blocking=True)
                sources.append(local)
            move_local(gradient, new)
            if is_marked(gradient):
                mark_as_ours(gradient, views.get(index))
        self._published = None if published is None else moved
        self._addresses = {} if published is None else self._addresses_of(moved)
        return sources

    def _grad(self, index: int) -> torch.Tensor | None:
        gradient = self._storage.params[index].sharded.grad
        return None if gradient is None else local_of(gradient)

    def _is_ours(self, index: int) -> bool:
        gradient = self._storage.params[index].sharded.grad
        if self._published is None or gradient is None or not is_marked(gradient):
            return False  # another tensor may have got the memory of an earlier .grad
        local = self._grad(index)
        return local is not None and local.data_ptr() == self._addresses.get(index, -1)

    def _locals(self, grads: FlatGradients) -> list[tuple[int, torch.Tensor]]:
        return grads.shards(self._storage.spec.mesh_info.shard_rank)

    def _addresses_of(self, grads: FlatGradients) -> dict[int, int]:
        locals_ = ((index, self._grad(index)) for index in grads.used)
        return {index: grad.data_ptr() for index, grad in locals_ if grad is not None}

    def _is_published(self, published: FlatGradients, new: FlatGradients) -> bool:
        """Whether every ``.grad`` is as it was set here, and ``new`` has the same layout."""
        return (
            published.layout is new.layout
            and self._addresses == self._addresses_of(published)
            and all(self._grad(index) is None for index in new.used - published.used)
        )

    # --- copies in a narrower dtype ---------------------------------------------------

    def _copies(self, grads: FlatGradients) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over each ``.grad`` that is a copy of a part of ``grads``, with that part."""
        for index, wide in self._locals(grads):
            grad = self._grad(index)
            if grad is not None and grad.dtype != wide.dtype:
                yield grad, wide

    def _take_edits(self, published: FlatGradients) -> None:
        """Apply the user's edits of the copies (clip, unscale, zero) to the wide sums."""
        for grad, wide in self._copies(published):
            take_edit(grad, wide)

    # --- hooks of users ---------------------------------------------------------------

    def has_hooks(self, new: FlatGradients) -> bool:
        """Whether users registered hooks on parameters that get a gradient."""
        return bool(self._inspect(new)[0])

    def takes_as_is(self, new: FlatGradients) -> bool:
        """Whether ``publish`` would set views of ``new`` without reading its values."""
        dtypes = {self._storage.params[index].sharded.dtype for index in new.used}
        hooked, has_none = self._inspect(new)
        return has_none and dtypes == {new.flat.dtype} and not hooked

    def _inspect(self, new: FlatGradients) -> tuple[list[int], bool]:
        """Return which parameters in ``new`` have hooks, and whether none has a gradient."""
        hooked, has_none = look_at(self._storage.params)
        return [index for index in hooked if index in new.used], has_none

    def _run_tensor_hooks(self, new: FlatGradients, hooked: list[int]) -> None:
        for index, local in self._locals(new):
            if index in hooked:
                grad = run_tensor_hooks(self._storage.params[index].sharded, local)
                if grad is not None:
                    take_edit(local_of(grad), local)

    # --- sums that grow by a copy from the device: see host_grads ---------------------

    @property
    def flat(self) -> torch.Tensor | None:
        """The flat sums while ``.grad`` may show them."""
        return None if self._published is None else self._published.flat

    def open_sum(self, new: FlatGradients) -> torch.Tensor | None:
        """Return the flat sums if adding ``new.flat`` to them is the same as ``publish(new)``.

        That holds where every ``.grad`` is a view of the sums and no hook is registered. The caller
        calls ``has_grown`` afterwards.
        """
        published = self._published
        if published is None or not self._is_published(published, new) or self.has_hooks(new):
            return None
        used = published.used | new.used
        dtypes = {self._storage.params[index].sharded.dtype for index in used}
        return published.flat if dtypes == {published.flat.dtype} == {new.flat.dtype} else None

    def has_grown(self, used: frozenset[int]) -> None:
        """Set ``.grad`` of the parameters whose gradients were added to ``open_sum``."""
        published = self._published
        if published is None or self._addresses != self._addresses_of(published):
            return  # cleared or replaced since
        self._set_more(published, used)

    def drop_hidden(self, indices: frozenset[int]) -> None:
        """Remove from ``open_sum`` gradients of parameters that had no ``.grad``."""
        if self._published is not None:
            hidden = indices - self._published.used
            self._published._replace(used=hidden).erase(hidden)
