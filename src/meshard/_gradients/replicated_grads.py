"""The ``.grad`` of replicated parameters, as views of buckets.

A *bucket* is a flat buffer that is all-reduced. Autograd adds unreduced gradients to ``.grad`` of a
replicated parameter. So while a backward runs, the reduced gradients in every ``.grad`` are hidden:
``.grad`` is None until autograd sets a new gradient. New gradients are packed into the bucket, or
into other memory while the bucket holds reduced ones. At the end of the backward each ``.grad`` is
a view of the reduced gradients again, or a copy of its part.

======= =============================================== ===========================================
state   when                                            ``.grad``
======= =============================================== ===========================================
shown   outside of a backward, or in one after settle() what was published, or a foreign gradient
hidden  from ``hide``, as a backward begins             None, or a new gradient of autograd
======= =============================================== ===========================================

A *foreign* gradient is one that the user set: ``hide`` takes it out of ``.grad``. ``publish`` adds
it to the bucket if the bucket gets a gradient of the same parameter, or else ``show`` puts it back.
"""

from __future__ import annotations

from typing import Any

import torch

from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._gradients.published import PublishedGrads
from meshard._params.replicated_params import ReplicatedParams
from meshard._torch.dtensor import plain_of


class _Mark:
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


def _in_one_layout(one: FlatGradients, other: FlatGradients) -> tuple[FlatGradients, FlatGradients]:
    """Return both in a layout that has the parameters of both."""
    if one.layout is other.layout:
        return one, other
    indices = tuple(sorted({*one.layout.indices, *other.layout.indices}))
    layouts = {each.layout.indices: each.layout for each in (one, other)}
    layout = layouts.get(indices) or GradientLayout(one.layout.params, indices, one.layout.device)
    one, other = (FlatGradients(layout, g.laid_out(layout), g.used) for g in (one, other))
    return one, other


def _take_edit(copy: torch.Tensor, wide: torch.Tensor) -> None:
    """Apply the user's edits of ``copy``, a copy of ``wide`` in any dtype, to ``wide``."""
    # torch's foreach kernels change a DTensor without incrementing its version counter. So values
    # are compared, and an edit that does not change ``copy`` is not seen. For example, a tiny value
    # of ``wide`` is 0 in ``copy``: if the user sets that element to 0, ``wide`` keeps the tiny
    # value.
    wide.copy_(torch.where(copy == wide.to(copy.dtype), wide, copy.to(wide.dtype)))


class ReplicatedGrads(PublishedGrads):
    """The ``.grad`` of the parameters of one bucket."""

    def __init__(self, unit_params: ReplicatedParams) -> None:
        super().__init__(unit_params)
        self._params = unit_params.params
        self.are_views = True  # False: .grad are copies of the bucket
        self._mark = _Mark()  # of the .grad that were set last
        self._published: FlatGradients | None = None
        self._bucket: torch.Tensor | None = None  # reused in every step
        self._layout: GradientLayout | None = None  # of the bucket
        self.is_hidden = False
        self._foreign: dict[int, torch.Tensor] = {}  # foreign gradients, while hidden

    # --- the bucket -------------------------------------------------------------------

    def free_memory(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the bucket ``[1, n]``; None while it may hold published sums."""
        if self._published is not None:
            return None
        bucket = self._bucket
        if bucket is None or self._layout is not layout or bucket.dtype != dtype:
            bucket = self._bucket = layout.allocate(dtype)
            self._layout = layout
        return bucket

    def forget_bucket(self) -> None:
        """Forget the bucket: everything in ``.grad`` counts as set by the user."""
        self._published = self._bucket = None

    # --- during a backward ------------------------------------------------------------

    @property
    def has_arrivals(self) -> bool:
        return self.is_hidden  # outside of a backward no .grad has arrived

    def hide(self, arrived: int | None = None) -> None:
        """Set every ``.grad`` to None, as a backward begins or ``publish`` is called.

        The ``.grad`` of parameter ``arrived`` stays, because it is a new gradient of this backward.
        But if modules compute with a cast copy, the copy has the new gradient, and nothing stays.
        """
        if self.is_hidden:
            return
        kept = set[int]()
        for index, param in enumerate(self._params):
            gradient = param.sharded.grad
            if gradient is None:
                continue
            is_ours = self._is_ours(index)
            if index == arrived and param.unsharded is param.sharded:
                if is_ours:
                    raise RuntimeError(
                        f"parameter {param.fqn!r} of {self._unit_params.label!r} got a gradient "
                        "before a backward had reached an output of the replicated module, and "
                        "holds a gradient that is reduced already. Its part of the loss was "
                        "computed outside the module's forward, or backward() was called inside "
                        "it. Drop the reduced gradient first (zero_grad()), or let the module's "
                        "forward return the loss."
                    )
                continue
            if is_ours:
                self._take_edits_of(index, gradient)
                kept.add(index)
            else:
                self._foreign[index] = self._outside_bucket(gradient)
            param.sharded.grad = None
        self.is_hidden = True
        if self._published is not None:
            cleared_or_replaced = self._published.used - kept
            self._published = self._published.without(cleared_or_replaced) if kept else None

    def _outside_bucket(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient that a user set, in memory that is not the bucket's."""
        if gradient.is_sparse:
            return gradient
        ours = (self._bucket, None if self._published is None else self._published.flat)
        memory = {flat.untyped_storage().data_ptr() for flat in ours if flat is not None}
        return gradient.clone() if gradient.untyped_storage().data_ptr() in memory else gradient

    def show(self) -> None:
        """Set every ``.grad`` to what was published, or to the foreign gradient that was hidden."""
        if not self.is_hidden:
            return
        self.is_hidden = False
        foreign, self._foreign = self._foreign, {}
        if self._published is not None:
            self._set_all(self._published)
        for index, gradient in foreign.items():
            param = self._params[index].sharded
            if param.grad is None:
                param.grad = gradient

    def add_arrived(self, grads: FlatGradients, index: int) -> None:
        """Move the new ``.grad`` of a parameter into ``grads``, whose ``flat`` is ``[1, n]``."""
        param = self._params[index]
        gradient, param.unsharded.grad = param.unsharded.grad, None
        assert gradient is not None
        part = param.shaped(grads.layout.range_of(grads.flat[0], index))
        if index in grads.used:
            part.add_(gradient)
        elif gradient.is_sparse:
            part.copy_(gradient.to_dense())
        else:
            part.copy_(gradient)

    # --- publication ------------------------------------------------------------------

    def publish(self, new: FlatGradients) -> None:
        was_hidden = self.is_hidden
        self.hide()
        total, taken = new, new.used.intersection(self._foreign)
        if self._published is not None:
            old, new = _in_one_layout(self._published, new)
            if torch.promote_types(old.flat.dtype, new.flat.dtype) != old.flat.dtype:
                old, new = new, old  # the parameters were cast to a wider dtype in between
            old.flat.add_(new.flat)  # unused ranges hold -0.0, which changes no sum
            total = old._replace(used=old.used | new.used)
        for index in taken:
            part = total.layout.range_of(total.flat, index)
            part.add_(self._params[index].plain_gradient(self._foreign.pop(index)))
        self._published = total
        if not was_hidden:
            self.show()

    def _set_all(self, grads: FlatGradients) -> None:
        self._published = grads
        self._mark = _Mark()
        for index, local in grads.shards(0):
            param = self._params[index]
            shaped = param.shaped(local)
            if shaped.dtype != param.sharded.dtype:
                shaped = shaped.to(param.sharded.dtype)
            elif not self.are_views:
                shaped = shaped.clone()
            param.sharded.grad = shaped
            self._mark.put_on(index, shaped, shaped)

    # --- gradients that are in .grad --------------------------------------------------

    @property
    def are_shown(self) -> bool:
        return False  # gradients may be waiting for ``settle``

    def settle(self) -> None:
        """Put everything that was published into ``.grad``, even in the middle of a backward.

        Only for a caller that knows that the present backward brings no more gradients here.
        """
        self.show()

    def clear(self) -> None:
        super().clear()
        self._published = None
        self.is_hidden = False
        self._foreign.clear()

    def _is_ours(self, index: int) -> bool:
        gradient, own = self._params[index].sharded.grad, self._range_of(index)
        if own is None or gradient is None or gradient.is_sparse:
            return False
        if self._mark.is_on(index, gradient):
            return True
        # The user may have set another tensor of the same memory, such as grad.detach().
        view = self._params[index].shaped(own)
        return (
            self.are_views
            and gradient.data_ptr() == view.data_ptr()
            and gradient.stride() == view.stride()
        )

    def _take_edits_of(self, index: int, gradient: torch.Tensor) -> None:
        """If ``gradient`` is a copy of its published sum, apply the user's edits to the sum."""
        own = self._range_of(index)
        if own is not None and not (self.are_views and gradient.dtype == own.dtype):
            _take_edit(self._params[index].plain_gradient(gradient), own)

    def _range_of(self, index: int) -> torch.Tensor | None:
        """Return the range of a parameter in the published sums; None if it has none there."""
        if self._published is None or index not in self._published.used:
            return None
        return self._published.layout.range_of(self._published.flat, index)
