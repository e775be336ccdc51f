"""The ``.grad`` of sharded parameters, on the device or in host memory.

A reduction yields one flat tensor per unit in the accumulate dtype. The dtype of ``.grad`` is that
of the parameter, unless ``grad_dtype`` says otherwise. If it is the accumulate dtype, ``.grad`` is
a view of the flat tensor, so that one kernel adds the next reduction. Otherwise ``.grad`` is a
copy, and the flat tensor is kept beside it: small gradients would be rounded away if microbatches
were added up in a narrow dtype.

Autograd sees no sharded parameter in a forward of its unit. So hooks that users register on sharded
parameters (``register_hook``, ``register_post_accumulate_grad_hook``) run from here. If a loss uses
a sharded parameter outside of the forward, autograd runs its hooks too.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from operator import is_not
from typing import Any

import torch

from meshard._comm.communicator import RecordedWork, Rows
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._params.sharded_param import UnitParam
from meshard._params.storage import MemoryLocation
from meshard._params.unit_params import UnitParams
from meshard._torch.dtensor import gradient_dtype, local_of, move_local, plain_of, wrap_like
from meshard._torch.private import accumulation_hooks_of, gradient_hooks_of, without_torch_function


class Mark:
    """An attribute of each ``.grad`` that meshard has set. A ``.grad`` that a user made has none.

    All ``.grad`` that are set together share one mark. If a ``.grad`` is pickled or deep-copied,
    the copy has ``True`` in place of the mark. (The ``-0.0`` marks are something else.)
    """

    def __init__(self) -> None:
        # From parameter index to the address of its .grad. The mark alone is not enough: after
        # ``grad.data = ...`` the tensor still has the mark, but the user's memory.
        self.addresses: dict[int, int] = {}

    def __reduce__(self) -> Any:
        return bool, (True,)

    def put_on(self, index: int, gradient: torch.Tensor, local: torch.Tensor) -> None:
        """Make a ``.grad`` refer to this object, and record the address of its local tensor."""
        gradient._meshard_published = self  # type: ignore[attr-defined]  # ours, on torch's object
        self.addresses[index] = local.data_ptr()

    def is_on(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether ``gradient`` has this mark, and lies where it lay when ``put_on`` marked it."""
        return (
            gradient is not None
            and getattr(gradient, "_meshard_published", None) is self
            and plain_of(gradient).data_ptr() == self.addresses.get(index, -1)
        )


class Published(Mark):
    """The flat sums of which the ``.grad`` of a unit are views, or copies in another dtype.

    Each of these ``.grad`` refers to this object, so the sums live as long as any of them.
    """

    def __init__(self, grads: FlatGradients) -> None:
        super().__init__()
        self.grads = grads


def is_clear(params: Sequence[UnitParam]) -> bool:
    """Whether no parameter has a gradient."""
    with without_torch_function():
        grads = [param.sharded.grad for param in params]
    return not any(map(is_not, grads, itertools.repeat(None)))


def in_one_layout(one: FlatGradients, other: FlatGradients) -> tuple[FlatGradients, FlatGradients]:
    """Return both in a layout that has the parameters of both."""
    if one.layout is other.layout:
        return one, other
    indices = tuple(sorted({*one.layout.indices, *other.layout.indices}))
    layouts = {each.layout.indices: each.layout for each in (one, other)}
    layout = layouts.get(indices) or GradientLayout(one.layout.params, indices, one.layout.device)
    one, other = (FlatGradients(layout, g.laid_out(layout), g.used) for g in (one, other))
    return one, other


def take_edit(copy: torch.Tensor, wide: torch.Tensor) -> None:
    """Apply the user's edits of ``copy``, a copy of ``wide`` in any dtype, to ``wide``."""
    # torch's foreach kernels change a DTensor without incrementing its version counter. So values
    # are compared, and an edit that does not change ``copy`` is not seen. For example, a tiny value
    # of ``wide`` is 0 in ``copy``: if the user sets that element to 0, ``wide`` keeps the tiny
    # value.
    wide.copy_(torch.where(copy == wide.to(copy.dtype), wide, copy.to(wide.dtype)))


@contextlib.contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


_NO_CONTEXT = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autograd records nothing, and new tensors are no inference tensors.

    If both hold already, the context does nothing, because ``torch.no_grad()`` costs a dozen calls.
    """
    if torch.is_inference_mode_enabled():
        return _outside_of_inference()
    return torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT


def _nothing() -> None:
    return None


class PublishedGrads:
    """The ``.grad`` of the parameters of one unit, and gradients that are yet to be put there.

    The defaults are for shards on the device. The methods from ``free_memory`` on are for
    replicated parameters, whose gradients have the same memory (the bucket) in every step:
    gradients are accumulated in the bucket, and sent from it.
    """

    # The user's communication hook, which averages a buffer over the replicas. The all-reduce then
    # sums only the marks of unused parameters. None: the all-reduce sums the buffer.
    average: Callable[[GradientLayout, torch.Tensor], None] | None = None

    def __init__(self, unit_params: UnitParams) -> None:
        self._unit_params = unit_params

    @property
    def are_shown(self) -> bool:
        """Whether ``.grad`` is known to show all that was published. If not, call ``settle``."""
        return True

    @property
    def has_arrivals(self) -> bool:
        """Whether unsharded parameters can have a ``.grad`` that is not reduced yet.

        For sharded parameters they always can. Under ``replicate`` they can only during a backward:
        at other times, what is in ``.grad`` was published, or the user has set it.
        """
        return True

    def publish(self, new: FlatGradients) -> RecordedWork | None:
        """Add reduced gradients to ``.grad``. ``new`` may be kept, and written to later.

        Returns the copy to host memory, if there is one, which the caller waits for.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Put everything that was published into ``.grad``."""

    def drop_arriving(self, indices: frozenset[int]) -> None:
        """Drop those gradients of some parameters that are on their way to ``.grad``."""

    def clear(self) -> None:
        """Clear every ``.grad``, and drop what is on its way there."""
        for param in self._unit_params.params:
            param.sharded.grad = None

    def free_memory(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory ``[1, numel]`` that is kept for ``.grad``; None if there is none free."""
        return None

    def begin_receiving(self, layout: GradientLayout, dtype: torch.dtype, divisor: int) -> None:
        """Let ``receive`` put gradients into free memory, divided by ``divisor``."""

    def receive(self, index: int, unreduced: FlatGradients | None) -> FlatGradients | None:
        """Take the gradient of parameter ``index``, which has just arrived, if it is large.

        Add it to ``unreduced``, and return the sum. If ``unreduced`` is None, put it into the
        memory of ``begin_receiving``, if that found any, and return None. What is not taken stays
        in ``.grad``.
        """
        return unreduced

    def end_receiving(self, gradients: list[torch.Tensor | None]) -> None:
        """Put received gradients into ``gradients``, added to gradients that are there already."""

    def place_received(self, rows: Rows, divisor: int) -> AbstractSet[int]:
        """Return the parameters whose gradients ``receive`` has put into the memory of ``rows``.

        ``receive`` has divided these gradients by the divisor of ``begin_receiving``. This method
        scales them, so that they are divided by ``divisor`` instead. If ``receive`` has put them
        into other memory than ``rows``, this method undoes the division and returns no parameter.
        """
        return frozenset()


class ShardedGrads(PublishedGrads):
    """The ``.grad`` of the sharded parameters of one unit."""

    def __init__(self, unit_params: UnitParams) -> None:
        super().__init__(unit_params)
        # Weak, so that the sums are freed with the last .grad that refers to them.
        self._shown: Callable[[], Published | None] = _nothing

    @property
    def _published(self) -> FlatGradients | None:
        shown = self._shown()
        return None if shown is None else shown.grads

    # --- publication ------------------------------------------------------------------

    def publish(self, new: FlatGradients) -> None:
        hooked, has_none = self._inspect(new)
        if hooked:
            self._run_tensor_hooks(new, hooked)
            has_none = is_clear(self._unit_params.params)
        shown = self._shown()
        if has_none:
            self._set_all(new)
        elif shown is not None and self._is_as_set(shown, new):
            self._take_edits(shown.grads)
            shown.grads.flat.add_(new.flat)  # unused ranges hold -0.0, which changes no sum
            for grad, wide in self._copies(shown.grads):
                grad.copy_(wide)
            self._set_more(shown, new.used)
        else:
            self._set_all(self._sum_with_foreign(new))
        for index in hooked:
            sharded = self._unit_params.params[index].sharded
            for hook in tuple((accumulation_hooks_of(sharded) or {}).values()):
                hook(sharded)

    def _sum_with_foreign(self, new: FlatGradients) -> FlatGradients:
        """Return ``new`` plus what is in ``.grad``.

        A ``.grad`` that a user set for a parameter that ``new`` lacks is not added, and stays as it
        is. Called if the user has set, replaced or cleared a ``.grad``, or if layouts differ.
        """
        for index, local in self._locals(new):
            old = self._grad(index)
            if old is not None and not self._is_ours(index):
                local.add_(old)  # set by the user
        published = self._published
        if published is not None:
            self._take_edits(published)
            gone = frozenset(index for index in published.used if not self._is_ours(index))
            if gone:
                # ``without`` erases in place. So it gets a copy of the sums, because the user may
                # still hold an earlier .grad, which is a view of them.
                published = published._replace(flat=published.flat.clone()).without(gone)
        if published is not None:
            new, published = in_one_layout(new, published)
            new.flat.add_(published.flat)
            new = new._replace(used=new.used | published.used)
        return new

    def _set_all(self, grads: FlatGradients) -> None:
        shown = Published(grads)
        self._set(shown, grads.used)
        self._shown = weakref.ref(shown)

    def _set_more(self, shown: Published, used: frozenset[int]) -> None:
        """Set ``.grad`` of the parameters in ``used`` that had none."""
        before = shown.grads.used
        if not used <= before:
            shown.grads = shown.grads._replace(used=before | used)
            self._set(shown, used - before)

    def _set(self, shown: Published, used: frozenset[int]) -> None:
        grads, params = shown.grads, self._unit_params.params
        rank, dtype = self._unit_params.spec.mesh_info.shard_rank, grads.flat.dtype
        for index, local in grads.layout.shards(grads.flat, rank, used):
            sharded = params[index].sharded
            chosen = gradient_dtype(sharded)
            if chosen is not dtype:
                local = local.to(chosen)
            sharded.grad = gradient = wrap_like(sharded, local)
            shown.put_on(index, gradient, local)

    # --- gradients that are in .grad --------------------------------------------------

    def move(self, location: MemoryLocation) -> list[torch.Tensor]:
        """Start moving every ``.grad`` to ``location``. The ``.grad`` objects stay the same.

        Return the old memory, to be kept until the copies are over.
        """
        shown, moved = self._shown(), None
        sources, views = list[torch.Tensor](), dict[int, torch.Tensor]()
        if shown is not None and shown.addresses == self._addresses_of(shown.grads):
            flat = location.empty_like(shown.grads.flat)
            flat.copy_(shown.grads.flat, non_blocking=True)
            sources.append(shown.grads.flat)
            moved = Published(shown.grads._replace(flat=flat))
            views = dict(self._locals(moved.grads))
        for index, param in enumerate(self._unit_params.params):
            gradient, local = param.sharded.grad, self._grad(index)
            if gradient is None or local is None:
                continue
            new = views.get(index)
            if new is None or new.dtype != local.dtype:
                new = location.empty_like(local)
                new.copy_(local, non_blocking=True)
                sources.append(local)
            is_ours = self._is_ours(index)
            move_local(gradient, new)
            # The mark would keep the old flat sums alive.
            vars(gradient).pop("_meshard_published", None)
            if is_ours and moved is not None:
                moved.put_on(index, gradient, new)
        self._shown = _nothing if moved is None else weakref.ref(moved)
        return sources

    def _grad(self, index: int) -> torch.Tensor | None:
        gradient = self._unit_params.params[index].sharded.grad
        return None if gradient is None else local_of(gradient)

    def _is_ours(self, index: int) -> bool:
        shown = self._shown()
        return shown is not None and shown.is_on(
            index, self._unit_params.params[index].sharded.grad
        )

    def _locals(self, grads: FlatGradients) -> list[tuple[int, torch.Tensor]]:
        return grads.shards(self._unit_params.spec.mesh_info.shard_rank)

    def _addresses_of(self, grads: FlatGradients) -> dict[int, int]:
        locals_ = ((index, self._grad(index)) for index in grads.used)
        return {index: grad.data_ptr() for index, grad in locals_ if grad is not None}

    def _is_as_set(self, shown: Published, new: FlatGradients) -> bool:
        """Whether ``new`` has the layout of ``shown``, and every ``.grad`` is as it was set here.

        Only parameters that ``shown`` or ``new`` uses are looked at.
        """
        return (
            shown.grads.layout is new.layout
            and shown.addresses == self._addresses_of(shown.grads)
            and all(self._grad(index) is None for index in new.used - shown.grads.used)
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

    def _inspect(self, new: FlatGradients) -> tuple[list[int], bool]:
        """Return which parameters in ``new`` have hooks, and whether no ``.grad`` is set."""
        shards = [param.sharded for param in self._unit_params.params]
        with without_torch_function():
            before = list(map(gradient_hooks_of, shards))
            after = list(map(accumulation_hooks_of, shards))
        hooked = list[int]()
        if any(before) or any(after):
            hooked = [index for index in sorted(new.used) if before[index] or after[index]]
        return hooked, is_clear(self._unit_params.params)

    def _run_tensor_hooks(self, new: FlatGradients, hooked: list[int]) -> None:
        for index, local in self._locals(new):
            sharded = self._unit_params.params[index].sharded
            hooks = gradient_hooks_of(sharded) if index in hooked else None
            if hooks:
                # A copy, because a hook may keep it.
                grad: torch.Tensor = wrap_like(
                    sharded, local.to(gradient_dtype(sharded), copy=True)
                )
                for hook in tuple(hooks.values()):
                    changed = hook(grad)
                    grad = grad if changed is None else changed
                take_edit(local_of(grad), local)

    # --- gradients whose values are still on their way: see HostGrads -----------------

    def _shows_views(self, used: frozenset[int], dtype: torch.dtype) -> bool:
        """Whether the ``.grad`` of all of ``used`` have ``dtype``, so they can be views of sums."""
        params = self._unit_params.params
        return all(gradient_dtype(params[index].sharded) == dtype for index in used)

    def publish_unread(self, new: FlatGradients) -> bool:
        """Publish ``new``, whose values are still being copied, if none has to be read for that.

        Return whether ``new`` was published.
        """
        hooked, has_none = self._inspect(new)
        if hooked or not has_none or not self._shows_views(new.used, new.flat.dtype):
            return False
        self._set_all(new)
        return True

    def extend(self, new: FlatGradients) -> torch.Tensor | None:
        """Prepare ``publish(new)`` so that the caller only has to add ``new.flat`` to the result.

        The result is the flat sums; ``.grad`` of parameters that had none is set here. If an
        addition is not enough, return None: if layouts differ, a ``.grad`` is no view of the sums,
        or a hook is registered.
        """
        shown = self._shown()
        if shown is None or not self._is_as_set(shown, new) or self._inspect(new)[0]:
            return None
        sums, used = shown.grads.flat, shown.grads.used | new.used
        if sums.dtype != new.flat.dtype or not self._shows_views(used, sums.dtype):
            return None
        self._set_more(shown, new.used)
        return sums


class HostGrads(PublishedGrads):
    """The ``.grad`` of the sharded parameters of one unit, in host memory.

    A reduced gradient is copied to a host buffer while backward goes on. ``.grad`` is made a view
    of the buffer at once, unless a value has to be read first, as for a hook. The values of
    ``.grad`` are valid after ``settle``, which waits for the copies.
    """

    def __init__(self, unit_params: UnitParams) -> None:
        super().__init__(unit_params)
        assert unit_params.host_copies is not None
        self._host_copies = unit_params.host_copies
        self._in_host_memory = ShardedGrads(unit_params)
        self._arriving: FlatGradients | None = None  # copied to a buffer that no .grad shows yet

    @property
    def are_shown(self) -> bool:
        """Whether ``.grad`` will hold everything as soon as ``HostCopies.wait`` returns."""
        return self._arriving is None

    def publish(self, new: FlatGradients) -> RecordedWork:
        """Add reduced gradients to ``.grad``; their values are there after ``settle``.

        **Stream:** ``CommStream.HOST``. **Lifetime:** the result keeps ``new`` alive until waited
        for.
        """
        comm, label = self._unit_params.comm, self._unit_params.label
        if self._arriving is not None:
            # Put the earlier gradient into ``.grad`` first, as on a device. There is only one place
            # for a gradient that is not shown yet, and sums in another order round differently.
            self.settle()
        sums = self._in_host_memory.extend(new)
        if sums is not None:
            return self._host_copies.store(sums, new.flat, comm, label=label, add=True)
        # New memory each time, because the user may still hold the last gradient. torch caches
        # pinned memory, so later steps need no call of the driver.
        host = self._unit_params.spec.location.empty_like(new.flat)
        copying = self._host_copies.store(host, new.flat, comm, label=label)
        arriving = new._replace(flat=host)
        if not self._in_host_memory.publish_unread(arriving):
            self._arriving = arriving
        return copying

    def settle(self) -> None:
        """Wait for all copies and put the gradients into ``.grad``. Blocks the host."""
        self._host_copies.wait()
        if self._arriving is not None:
            arrived, self._arriving = self._arriving, None
            with unrecorded():  # an evaluation calls this too, perhaps under inference_mode
                self._in_host_memory.publish(arrived)

    def drop_arriving(self, indices: frozenset[int]) -> None:
        """Wait for copies in flight, and drop the copied gradients of some parameters."""
        self._host_copies.wait()
        if self._arriving is not None:
            self._arriving = self._arriving.without(indices)

    def clear(self) -> None:
        self._host_copies.wait()
        self._arriving = None
        super().clear()
