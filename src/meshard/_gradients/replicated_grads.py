"""The .grad of replicated parameters, as views of buckets.

Autograd adds to the ``.grad`` of such a parameter by itself, and what it adds has not been reduced.
So while a backward runs, what is accumulated is out of its sight: every ``.grad`` is None, until
autograd puts a new gradient there, which goes into the bucket. At the end each ``.grad`` is a view
of the bucket again.
"""

from __future__ import annotations

import warnings

import torch

from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._engine.param_group import ParamGroup
from meshard._gradients.sharded_grads import ShardedGrads, mark_as_ours
from meshard._params.replicated_params import ReplicatedParam
from meshard._params.storage import MemoryLocation


class Replaced:
    """Counts the gradients that users have put in the place of ours, in a whole module."""

    def __init__(self) -> None:
        self.count = 0


class ReplicatedGrads(ShardedGrads):
    """The ``.grad`` of the parameters of one bucket.

    Args:
        group: Whose gradients.
    """

    def __init__(self, group: ParamGroup) -> None:
        super().__init__(group)
        self.are_views = True  # else .grad are copies of what is in the bucket
        self.replaced = Replaced()  # of all buckets of the module
        self._bucket: torch.Tensor | None = None  # used again in every step
        self.is_hidden = False
        self._is_settled = False  # hidden no more for the rest of a backward: see settle
        self._strangers: dict[int, torch.Tensor] = {}  # the users' own gradients, while hidden
        self._given_back: frozenset[int] = frozenset()  # of these, by the last backward
        self._in_place_of_ours: frozenset[int] = frozenset()

    def be_like(self, other: object) -> None:
        """See ``ShardedGrads.be_like``."""
        if isinstance(other, ReplicatedGrads):
            self.are_views = other.are_views

    # --- the bucket --------------------------------------------------------------------------

    def free_memory(self, layout: GradientLayout, dtype: torch.dtype) -> None:
        """See ``ShardedGrads.free_memory``: sums lie in the bucket."""

    def free_bucket(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        """Return ``[1, n]``, the same memory in each step; None if it is in use.

        The caller must know that no reduction and no window uses it.
        """
        self.release_cleared()
        if self._shown is not None:
            return None
        bucket, wanted = self._bucket, (1, layout.numel)
        if bucket is None or bucket.shape != wanted or bucket.dtype != dtype:
            bucket = self._bucket = torch.empty(wanted, dtype=dtype, device=layout.device)
        return bucket

    # --- during a backward -------------------------------------------------------------------

    def hide(self, arrived: int | None = None) -> None:
        """A backward begins: let every ``.grad`` be None.

        Args:
            arrived: A parameter that has got its gradient already, from outside the module.

        Raises:
            RuntimeError: It was added to what had been reduced before.
        """
        if self.is_hidden:
            return
        kept: set[int] = set()
        for index, param in enumerate(self._group.params):
            gradient = param.sharded.grad
            if gradient is None:
                continue
            is_ours = self._is_ours(index)
            if is_ours and index != arrived:
                self._take_copy(index, gradient)
            if index == arrived:
                if is_ours:
                    raise RuntimeError(
                        f"parameter {param.fqn!r} of {self._group.label!r} got a gradient from "
                        "outside the forward of the replicated module before the backward of the "
                        "module had begun, and holds a gradient that is reduced already; drop "
                        "that first (zero_grad()), or compute this part of the loss inside the "
                        "module's forward."
                    )
                continue
            param.sharded.grad = None
            if is_ours:
                kept.add(index)
            else:
                self._strangers[index] = self._of_its_own(gradient)
        self.is_hidden = True
        strangers = frozenset(self._strangers)
        if self._shown is not None:
            self._keep_only(frozenset(kept))
            self._in_place_of_ours |= strangers - self._given_back
        self._in_place_of_ours &= strangers

    def _keep_only(self, kept: frozenset[int]) -> None:
        """Forget what users have cleared or replaced."""
        assert self._shown is not None
        gone = self._shown.used - kept
        if gone == self._shown.used:
            self._shown = None
        elif gone:
            self._shown.erase(gone)
            self._shown = self._shown._replace(used=kept)

    def _of_its_own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what a user has put into ``.grad``, in memory that is not the bucket's."""
        if gradient.is_sparse:
            return gradient
        flat_grads = (self._bucket, None if self._shown is None else self._shown.flat)
        memory = {flat.untyped_storage().data_ptr() for flat in flat_grads if flat is not None}
        return gradient.clone() if gradient.untyped_storage().data_ptr() in memory else gradient

    def leave(self) -> None:
        """Have nothing to do with what is in ``.grad`` any more: it is as if users had put it."""
        self._shown = self._bucket = None

    def give_away(self) -> None:
        """The bucket is no more: others take over what is in ``.grad``, by value."""
        self.hide()  # as at the beginning of a backward, to see what users have replaced
        self._record_taken(frozenset(self._strangers))
        self.show()

    def _record_taken(self, strangers: frozenset[int]) -> None:
        """Note that users' gradients have been added to ours, and say so if that costs a copy."""
        replaced = strangers & self._in_place_of_ours
        self._in_place_of_ours -= replaced
        if not replaced:
            return
        if not self.replaced.count:
            names = ", ".join(repr(self._group.params[i].fqn) for i in sorted(replaced))
            warnings.warn(
                f".grad of {names} in {self._group.label!r} was replaced by another tensor; it is "
                "taken over by value, which costs a copy. Change gradients in place "
                "(grad.mul_(...), grad.copy_(...)) to keep them views of their bucket. This is "
                "said once; num_replaced_gradients counts.",
                stacklevel=2,
            )
        self.replaced.count += len(replaced)

    def show(self) -> None:
        """The backward is over: let every ``.grad`` be what has been accumulated."""
        if not self.is_hidden:
            return
        self.is_hidden = False
        if self._is_settled:
            self._is_settled = False  # they are, unless an optimizer has dropped them since
            return
        strangers, self._strangers = self._strangers, {}
        self._given_back = frozenset(strangers)
        if self._shown is not None:
            self._show(self._shown)
        for index, gradient in strangers.items():
            param = self._group.params[index].sharded
            if param.grad is None:
                param.grad = gradient

    def add(self, new: FlatGradients) -> None:
        """Add reduced gradients; ``new`` may be kept and written to later."""
        if self._is_settled:
            self.show()
        was_hidden = self.is_hidden
        self.hide()
        total, taken = new, frozenset(self._strangers) & new.used
        if self._shown is not None:
            old = self._shown
            if old.layout is not new.layout:
                indices = tuple(sorted({*old.layout.indices, *new.layout.indices}))
                old, new = self._laid_out(old, indices), self._laid_out(new, indices)
            if torch.promote_types(old.flat.dtype, new.flat.dtype) != old.flat.dtype:
                old, new = new, old  # parameters have been cast to more bits since
            old.flat.add_(new.flat)  # where one has no gradient, its slot is negative zero
            total = old._replace(used=old.used | new.used)
        for index, local in total.shards(0):
            gradient = self._strangers.get(index)
            if gradient is not None and index in taken:
                param = self._group.params[index]
                assert isinstance(param, ReplicatedParam)
                local.add_(param.own_part_of(gradient))
                del self._strangers[index]
        self._record_taken(taken)
        self._shown = total
        if not was_hidden:
            self.show()

    # --- as elsewhere, but with plain tensors ------------------------------------------------

    def offer(self, new: FlatGradients) -> bool:
        """See ``ShardedGrads.offer``: ordinary tensors are stepped one by one."""
        return False

    def settle(self) -> None:
        """Have all that was added in ``.grad``, in the middle of a backward too."""
        if self.is_hidden and not self._is_settled:
            self.show()
            self.is_hidden = self._is_settled = True  # autograd is through with these parameters

    def show_early(self) -> bool:
        """As for ``HostGrads``."""
        self.settle()
        return True

    def clear(self) -> None:
        """Drop every ``.grad``."""
        super().clear()
        self.is_hidden = self._is_settled = False
        self._strangers.clear()

    def release_cleared(self) -> None:
        """Forget what was shown once the user has dropped it."""
        if not self.is_hidden or self._is_settled:
            super().release_cleared()

    def move(self, location: MemoryLocation) -> list[torch.Tensor]:
        """Refuse: a replicated module is not offloaded."""
        raise NotImplementedError  # ReplicatedParams.move comes first, and says what to do instead

    def _is_ours(self, index: int) -> bool:
        if super()._is_ours(index):
            return True
        gradient, own = self._grad(index), self._view_of(index)
        if gradient is None or own is None or gradient.is_sparse:
            return False
        # The same memory under another name: grad.detach(), or a view.
        is_same = gradient.data_ptr() == own.data_ptr() and gradient.dtype == own.dtype
        return is_same and gradient.stride() == own.stride()

    def _view_of(self, index: int) -> torch.Tensor | None:
        """Return what a ``.grad`` is, as long as nobody has replaced it and it is a view."""
        if self._shown is None or index not in self._shown.used or not self.are_views:
            return None
        param, flat = self._group.params[index], self._only(self._shown, index)
        assert isinstance(param, ReplicatedParam)
        return None if flat is None else param.shaped(flat)

    def _grad(self, index: int) -> torch.Tensor | None:
        return self._group.params[index].sharded.grad

    def _set(self, index: int, local: torch.Tensor) -> int:
        param = self._group.params[index]
        assert isinstance(param, ReplicatedParam)
        shaped = param.shaped(local)
        if shaped.dtype != param.sharded.dtype:
            shaped = shaped.to(param.sharded.dtype)
        elif not self.are_views:
            shaped = shaped.clone()
        param.sharded.grad = shaped
        mark_as_ours(shaped)
        return shaped.data_ptr()

    def _take_copy(self, index: int, gradient: torch.Tensor) -> None:
        """Let the sum follow what the user did to a gradient that is a copy of it."""
        if self._shown is None or (self.are_views and gradient.dtype == self._shown.flat.dtype):
            return
        own = self._only(self._shown, index)
        param = self._group.params[index]
        assert isinstance(param, ReplicatedParam)
        if own is not None:
            self._take_edit(param.own_part_of(gradient), own)

    @staticmethod
    def _only(flat_grads: FlatGradients, index: int) -> torch.Tensor | None:
        param_range = flat_grads.layout.ranges.get(index)
        return (
            None
            if param_range is None
            else flat_grads.flat.view(-1).narrow(0, param_range.offset, param_range.numel)
        )

    def _look(self, new: FlatGradients) -> tuple[list[int], bool]:
        return [], self._is_clear()  # autograd runs the hooks of these parameters by itself
