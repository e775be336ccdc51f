"""What has a group of parameters accumulated, and how far is it reduced?

Three accumulators per unit, all in the accumulate dtype: ``U`` holds whole gradients that no
collective has seen, ``Q`` what has been reduced over the shard group but not across the replicas,
``A`` is the ``.grad`` of the sharded parameters. With ``g`` the gradients of one backward:

    NONE             U += g
    REDUCE_SCATTER   Q += mean_S(U + g);                   U = 0
    FULL             A += mean_R(Q + mean_S(U + g));       U = 0;  Q = 0
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshard._comm.foreach_reduce import ReduceRequest, Reduction
from meshard._comm.gradient_buffer import GradientLayout
from meshard._params.dtensors import local_of, wrap_like
from meshard._runtime.param_group import ParamGroup


class _Held(NamedTuple):
    """An accumulator: gradients of some parameters in one flat tensor."""

    layout: GradientLayout
    flat: torch.Tensor  # U: [shard_count, shard_numel]; Q and A: [shard_numel]
    used: frozenset[int]


class ReductionInFlight(NamedTuple):
    """A reduction of this group that has been started."""

    reduction: Reduction
    layout: GradientLayout
    is_full: bool  # goes into .grad, not into the partial


class GradientState:
    """The accumulators of one group, and the moves between them.

    Args:
        group: Whose gradients.
        reduce_dtype: dtype on the wire; None: the widest dtype of the whole gradients.
        accumulate_dtype: dtype of the accumulators.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype,
    ) -> None:
        self._group = group
        self._reduce_dtype = reduce_dtype
        self._accumulate_dtype = accumulate_dtype
        self._layouts: dict[tuple[int, ...], GradientLayout] = {}
        self._unreduced: _Held | None = None  # U
        self._partial: _Held | None = None  # Q
        self._deposit: _Held | None = None  # A, as long as .grad is what we put there
        # The .grad objects over it, by id and address: a weakref would forbid Module.to to swap
        # them, and a reference would keep their memory.
        self._deposited: list[tuple[int, int]] = []
        self._deposit_version = 0

    @property
    def is_pending(self) -> bool:
        """Whether anything is accumulated that is not in ``.grad`` yet."""
        return self._unreduced is not None or self._partial is not None

    def clear(self) -> None:
        """Forget what is accumulated but not in ``.grad``."""
        self._unreduced = self._partial = None

    def clear_window(self) -> None:
        """Forget everything, ``.grad`` included."""
        for param in self._group.params:
            param.sharded.grad = None
        self.clear()
        self._deposit = None

    def release_cleared(self) -> None:
        """Give the memory of ``A`` back once the user has dropped the gradients that show it."""
        if self._deposit is not None and not self._grads(self._deposit):
            self._deposit = None

    def drop_arrived(self) -> None:
        """Forget whole gradients that have arrived but were not taken."""
        for param in self._group.params:
            param.unsharded.grad = None

    def _take(self) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        for param in self._group.params:
            gradient = param.unsharded.grad
            if gradient is not None:
                param.unsharded.grad = None
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            else:
                gradients.append(None)
        return gradients

    def _layout_for(self, gradients: list[torch.Tensor | None]) -> GradientLayout:
        """Return the layout of all that may have a gradient, on this rank or on another."""
        held: set[int] = set()
        for accumulator in (self._unreduced, self._partial):
            if accumulator is not None:
                held.update(accumulator.layout.indices)
        indices = tuple(
            index
            for index, param in enumerate(self._group.params)
            if param.sharded.requires_grad or index in held or gradients[index] is not None
        )
        if indices not in self._layouts:
            layouts = [param.layout for param in self._group.params]
            device = self._group.place.device
            self._layouts[indices] = GradientLayout(layouts, indices, device)
        return self._layouts[indices]

    def _wire_dtype(self, layout: GradientLayout) -> torch.dtype:
        if self._reduce_dtype is not None:
            return self._reduce_dtype
        dtypes = [self._group.compute_dtypes[index] for index in layout.indices]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    @staticmethod
    def _laid_out(held: _Held, layout: GradientLayout) -> torch.Tensor:
        if held.layout is layout:
            return held.flat
        return held.layout.move(held.flat, layout, held.used)

    @torch.no_grad()
    def accumulate(self) -> None:
        """``NONE``: add the whole gradients that have arrived to ``U``."""
        gradients = self._take()
        layout = self._layout_for(gradients)
        if not layout.indices:
            return
        used = frozenset(i for i, gradient in enumerate(gradients) if gradient is not None)
        if self._unreduced is None:
            flat = layout.allocate(self._accumulate_dtype)
            layout.pack(flat, gradients)
        else:
            flat = self._laid_out(self._unreduced, layout)
            layout.add(flat, gradients)
            used |= self._unreduced.used
        self._unreduced = _Held(layout, flat, used)

    @torch.no_grad()
    def start_reduce(
        self, *, over_replicas: bool, divide_factor: float | None
    ) -> ReductionInFlight | None:
        """``REDUCE_SCATTER`` and ``FULL``: start reducing ``U`` and what has arrived.

        **Collective:** the shard group, then the replica group if ``over_replicas``.
        """
        gradients = self._take()
        layout = self._layout_for(gradients)
        if not layout.indices:
            return None
        roles = self._group.place.roles
        buffer, used = self._whole_buffer(layout, gradients)
        partial = None if self._partial is None else self._laid_out(self._partial, layout)
        self._unreduced = self._partial = None
        request = ReduceRequest(
            buffer=buffer,
            partial=partial,
            shard_group=roles.shard_group,
            replicate_group=roles.replicate_group if over_replicas else None,
            replicate_count=roles.replicate_count,
            divide_factor=divide_factor,
            accumulate_dtype=self._accumulate_dtype,
            marks=layout.marks_for(used),
            label=self._group.label,
        )
        reduction = Reduction(request, self._group.comm)
        is_full = over_replicas or roles.replicate_group is None
        return ReductionInFlight(reduction, layout, is_full)

    def _whole_buffer(
        self, layout: GradientLayout, gradients: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor, frozenset[int]]:
        used = frozenset(i for i, gradient in enumerate(gradients) if gradient is not None)
        wire_dtype = self._wire_dtype(layout)
        if self._unreduced is None:
            buffer = layout.allocate(wire_dtype)
            layout.pack(buffer, gradients)
            return buffer, used
        flat = self._laid_out(self._unreduced, layout)
        layout.add(flat, gradients)
        return flat.to(wire_dtype), used | self._unreduced.used

    @torch.no_grad()
    def finish_reduce(self, in_flight: ReductionInFlight) -> None:
        """Put the result of a reduction where it belongs: into ``.grad``, or into ``Q``."""
        reduced = in_flight.reduction.finish()
        if not in_flight.is_full:
            self._partial = _Held(in_flight.layout, reduced.shard, reduced.used)
        elif reduced.used:
            self._add_to_grad(_Held(in_flight.layout, reduced.shard, reduced.used))

    def _add_to_grad(self, new: _Held) -> None:
        if self._is_deposit_valid(new):
            assert self._deposit is not None
            self._deposit.flat.add_(new.flat)
            self._write_grads(self._deposit)
        elif all(self._group.params[index].sharded.grad is None for index in new.used):
            self._deposit = new
            self._write_grads(new)
            self._deposited = self._identities(new)
        else:
            self._deposit = None
            self._add_one_by_one(new)
        if self._deposit is not None:
            self._deposit_version = self._version_of(self._deposit)
        self._run_hooks(new)

    def _grads(self, held: _Held) -> list[torch.Tensor]:
        """Return the ``.grad`` of what ``held`` is about, without those that are None."""
        grads = [self._group.params[index].sharded.grad for index in held.layout.indices]
        return [gradient for gradient in grads if gradient is not None]

    def _version_of(self, held: _Held) -> int:
        grads = self._grads(held)
        own = sum(gradient._version + local_of(gradient)._version for gradient in grads)
        return int(held.flat._version + own)

    def _is_deposit_valid(self, new: _Held) -> bool:
        """Whether every ``.grad`` is still what we put there, for the same parameters."""
        old = self._deposit
        if old is None or old.layout is not new.layout or old.used != new.used:
            return False
        is_same = self._deposited == self._identities(old)
        return is_same and self._deposit_version == self._version_of(old)

    def _identities(self, held: _Held) -> list[tuple[int, int]]:
        return [(id(gradient), local_of(gradient).data_ptr()) for gradient in self._grads(held)]

    def _local_grads(self, held: _Held) -> list[tuple[int, torch.Tensor]]:
        shard_rank = self._group.place.roles.shard_rank
        views = []
        for index in held.layout.indices:
            if index in held.used:
                shape = held.layout.params[index].local_shape(shard_rank)
                offset = held.layout.slots[index].offset
                owned = held.flat.narrow(0, offset, shape.numel())
                views.append((index, owned.view(shape)))
        return views

    def _write_grads(self, held: _Held) -> None:
        """Make ``.grad`` show ``held``: as views, or as copies in the parameter's own dtype."""
        for index, local in self._local_grads(held):
            sharded = self._group.params[index].sharded
            if sharded.grad is None:
                sharded.grad = wrap_like(sharded, local.to(sharded.dtype))
            elif local.dtype != sharded.dtype:
                local_of(sharded.grad).copy_(local)

    def _add_one_by_one(self, new: _Held) -> None:
        for index, local in self._local_grads(new):
            sharded = self._group.params[index].sharded
            if sharded.grad is None:
                sharded.grad = wrap_like(sharded, local.to(sharded.dtype))
            else:
                old = local_of(sharded.grad)
                old.copy_(local + old)

    def _run_hooks(self, new: _Held) -> None:
        for index in new.used:
            sharded = self._group.params[index].sharded
            hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
            if hooks:
                for hook in tuple(hooks.values()):
                    hook(sharded)
