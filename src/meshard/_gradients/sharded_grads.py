"""The .grad of sharded parameters.

The DTensors that ``.grad`` shows are made once, over one flat tensor, which takes longer than to
move its memory; what a reduction yields is written there. The memory goes back whenever gradients
are cleared, unless the user wants it to stay. What somebody else holds then, in Python or in a
graph, is left to them.

Autograd never sees a shard, so what ``register_hook`` and ``register_post_accumulate_grad_hook``
have put on one is run from here.

What a reduction yields is one flat tensor per unit in the accumulate dtype. The gradients of
parameters of that dtype are views of it, so that the next reduction is added in one kernel. Those
of narrower parameters are copies; the wide sums stay, or microbatches would round each other away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from sys import getrefcount
from typing import NamedTuple
from weakref import getweakrefcount

import torch

from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._engine.param_group import ParamGroup
from meshard._params.sharded_param import ShardedParam
from meshard._params.storage import MemoryLocation
from meshard._torch.dtensor import local_of, locals_of, move_local, wrap_like
from meshard._torch.private import num_tensors_on, references_in_torch, without_torch_function

_REQUIRES_GRAD = attrgetter("requires_grad")
_ATTRIBUTES = attrgetter("__dict__")


class Holders:
    """Knows whether tensors are as they were when nobody else had seen them.

    Counted are Python's references, weak ones too, those inside torch (a graph that has saved a
    tensor holds it without Python), and the tensors on the storage (views, and what ``detach`` and
    numpy make). What a user has put on a tensor (an attribute, a graph) would outlive it as well.

    Args:
        tensors: All on the storage of the first, or over tensors that are; they are held.
        shown: Those of them that users are given.
    """

    def __init__(self, tensors: list[torch.Tensor], shown: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._storage = tensors[0].untyped_storage()
        self._shown = shown
        self._alone: list[int] = []

    def begin(self) -> None:
        """Nobody else has seen the tensors: whoever comes now is another one."""
        self._alone = self._count()

    @property
    def are_alone(self) -> bool:
        """Whether nobody else holds or has marked any of them, or holds a tensor on the storage."""
        return self._count() == self._alone

    def _count(self) -> list[int]:
        tensors, shown = self._tensors, self._shown
        with without_torch_function():
            return [
                num_tensors_on(self._storage),
                *map(getrefcount, tensors),
                *map(references_in_torch, tensors),
                *map(getweakrefcount, tensors),
                *map(_REQUIRES_GRAD, shown),
                *map(len, map(_ATTRIBUTES, shown)),
            ]


class Places(NamedTuple):
    """Where some gradients are: for whoever asks, which few do."""

    start: int
    offsets: Mapping[int, int | None]  # None: it is empty, and nowhere
    used: frozenset[int]

    def addresses(self) -> dict[int, int]:
        """Return them by parameter."""
        return {
            index: 0 if offset is None else self.start + offset
            for index, offset in self.offsets.items()
            if index in self.used
        }


class KeptGrads:
    """The gradients of one unit's shards, whether they are in use or not.

    Args:
        params: Of the unit.
        layout: Of their gradients.
        dtype: Of the sums.
    """

    def __init__(
        self, params: Sequence[ShardedParam], layout: GradientLayout, dtype: torch.dtype
    ) -> None:
        self.flat = torch.empty(layout.shard_numel, dtype=dtype, device=layout.device)
        self._layout = layout
        self._params = params
        rank, everything = params[0].shard_rank, frozenset(layout.indices)
        locals_ = layout.shards(self.flat, rank, everything)
        # A gradient of a narrower parameter is a copy, and made anew in each step.
        self._is_whole = all(params[index].sharded.dtype == dtype for index, _ in locals_)
        self._made_for = [(params[index], params[index].sharded) for index, _ in locals_]
        self.unsharded_params = {
            index: wrap_like(params[index].sharded, local) for index, local in locals_
        }
        self._locals = [local for _, local in locals_]
        start = self.flat.data_ptr()
        self._offsets = {
            index: own.data_ptr() - start if own.numel() else None for index, own in locals_
        }
        self._storage = self.flat.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self._has_memory = True
        unsharded_params: list[torch.Tensor] = list(self.unsharded_params.values())
        self._holders = Holders([self.flat, *unsharded_params, *self._locals], unsharded_params)

    def begin(self, mark: Callable[[torch.Tensor], None]) -> None:
        """Mark every ``.grad``-to-be. Nobody else has seen these tensors."""
        for unsharded_param in self.unsharded_params.values():
            mark(unsharded_param)
        del unsharded_param  # this frame would count
        self._holders.begin()

    def take(self) -> None:
        """Have memory, if it has been given back."""
        if not self._has_memory:
            self._storage.resize_(self._num_bytes)
            self._has_memory = True

    def give_back(self) -> bool:
        """Give the memory back, now that no ``.grad`` is one of these.

        Returns:
            Whether that was possible; else others hold some of these tensors, which are theirs now.
        """
        storage = self._storage
        # Once numpy has seen it, or another process, it cannot be resized.
        if not storage.resizable() or storage.is_shared() or not self._holders.are_alone:
            return False
        storage.resize_(0)
        self._has_memory = False
        return True

    def fits(self, layout: GradientLayout, dtype: torch.dtype) -> bool:
        """Whether this is for gradients in that layout and dtype, of the parameters of today."""
        if self._layout is not layout or self.flat.dtype is not dtype:
            return False
        for param, made_for in self._made_for:
            if param.sharded is not made_for:
                return False
        # A cast of the module puts other memory under the gradients that there are.
        return all(map(is_, locals_of(self.unsharded_params.values()), self._locals))

    def show(self, used: frozenset[int]) -> Places | None:
        """Make these the ``.grad`` of the parameters in ``used``.

        Returns:
            Where each ``.grad`` is; None if they cannot be shown.
        """
        if not self._is_whole:
            return None
        params, unsharded_params = self._params, self.unsharded_params
        with without_torch_function():
            for index in unsharded_params if len(used) == len(unsharded_params) else used:
                params[index].sharded.grad = unsharded_params[index]
        return Places(self.flat.data_ptr(), self._offsets, used)


def look_at(params: Sequence[ShardedParam]) -> tuple[list[int], bool]:
    """Return which parameters have hooks, and whether none has a gradient."""
    hooked, is_clear = [], True
    with without_torch_function():
        for index, param in enumerate(params):
            sharded = param.sharded
            if sharded.grad is not None:
                is_clear = False
            if sharded._backward_hooks or sharded._post_accumulate_grad_hooks:
                hooked.append(index)
    return hooked, is_clear


def run_tensor_hooks(sharded: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
    """Run what ``register_hook`` has registered, on a copy of what is about to be added.

    Returns:
        What they have made of it, as a DTensor; None if there is no such hook.
    """
    hooks = sharded._backward_hooks
    if not hooks:
        return None
    # A copy: a hook may keep it.
    grad: torch.Tensor = wrap_like(sharded, local.to(sharded.dtype, copy=True))
    for hook in tuple(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def run_post_hooks(sharded: torch.Tensor) -> None:
    """Run what ``register_post_accumulate_grad_hook`` has registered, now that it is added."""
    hooks = sharded._post_accumulate_grad_hooks
    for hook in tuple(hooks.values()) if hooks else ():
        hook(sharded)


_OURS = "_meshard_shown"  # on every .grad that was put there by ShardedGrads
_MAX_HELD = 2  # who holds on to gradients twice, or needs none, will do so again


def mark_as_ours(gradient: torch.Tensor) -> None:
    """Note that a ``.grad`` was put there by us."""
    setattr(gradient, _OURS, True)


class ShardedGrads:
    """The ``.grad`` of a group's sharded parameters.

    Args:
        group: Whose gradients.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._shown: FlatGradients | None = None  # as long as every .grad is what we put there
        self.offered: FlatGradients | None = (
            None  # to who steps by it at once; .grad does not show it
        )
        # Where each .grad is, by parameter. A weakref would forbid Module.to to swap it, and a
        # reference would keep its memory.
        self._noted: dict[int, int] | Places = {}
        self.is_kept = False  # the memory, from step to step
        self._kept: KeptGrads | None = None
        self._num_held = 0  # how often somebody else held on to what was kept

    def keep_memory(self, is_kept: bool) -> None:
        """Keep the memory from step to step, whoever else holds it; or not."""
        self.is_kept = is_kept
        if not is_kept and self._shown is None:
            self._kept = None

    def be_like(self, other: object) -> None:
        """Take over what users have chosen for the gradients of a unit, for its copy."""
        if isinstance(other, ShardedGrads):
            self.is_kept = other.is_kept

    def not_shown(self) -> None:
        """Keep no memory for what was reduced: there is no gradient in it, or not any more."""
        if self._shown is None and not self.is_kept and self._kept is not None:
            self._kept = None
            self._num_held += 1

    def free_memory(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        """Return ``[shard_numel]`` for new sums, the same in each step; None: take any memory.

        The caller must know that nothing which it has started uses it.
        """
        self.release_cleared()
        if self._shown or self.offered or not self._is_worth_keeping(layout):
            return None
        if self._kept is None or not self._kept.fits(layout, dtype):
            self._kept = KeptGrads(self._group.params, layout, dtype)
            self._kept.begin(mark_as_ours)
        self._kept.take()
        return self._kept.flat

    def _is_worth_keeping(self, layout: GradientLayout) -> bool:
        if self.is_kept:
            return True
        # Of a large unit the bytes take longer. On a device, streams would have to be asked
        # whether memory may go.
        is_retained = self._num_held >= _MAX_HELD
        return self._group.comm.may_keep_buffers and not (layout.is_large or is_retained)

    def add(self, new: FlatGradients) -> None:
        """Add reduced gradients to ``.grad``; ``new`` may be kept and written to later."""
        hooked, is_clear = self._look(new)
        if hooked:
            self._run_tensor_hooks(new, hooked)
            is_clear = self._is_clear()
        shown = self._shown
        if shown is None and is_clear:
            self._show(new)
        elif shown is not None and self._is_shown(shown, new):
            self._take_edits(shown)
            shown.flat.add_(new.flat)  # where one has no gradient, its slot is negative zero
            for grad, wide in self._copies(shown):
                grad.copy_(wide)
            self._show_more(shown, new.used)
        else:
            self._show(self._add_apart(new))
        for index in hooked:
            run_post_hooks(self._group.params[index].sharded)

    def _add_apart(self, new: FlatGradients) -> FlatGradients:
        """Add where some gradients are not what we put there, or parameters were frozen since."""
        for index, local in self._locals(new):
            old = self._grad(index)
            if old is not None and not self._is_ours(index):
                local.add_(old)  # the user's own: adopted by value
        if self._shown is not None:
            self._take_edits(self._shown)
            gone = frozenset(index for index in self._shown.used if not self._is_ours(index))
            shown = self._shown._replace(used=self._shown.used - gone)
            if gone:
                # In a copy: somebody may hold what is not in .grad any more.
                shown = shown._replace(flat=shown.flat.clone())
                shown._replace(used=gone).erase(gone)
            indices = tuple(sorted({*shown.layout.indices, *new.layout.indices}))
            new, shown = self._laid_out(new, indices), self._laid_out(shown, indices)
            new.flat.add_(shown.flat)
            new = new._replace(used=new.used | shown.used)
        return new

    def _is_clear(self) -> bool:
        """Whether no parameter has a gradient."""
        with without_torch_function():
            return all(param.sharded.grad is None for param in self._group.params)

    def _show(self, flat_grads: FlatGradients) -> None:
        """Let every ``.grad`` be what ``flat_grads`` says."""
        self._shown = flat_grads
        if self._kept is not None:
            is_there = self._kept.flat is flat_grads.flat
            positions = self._kept.show(flat_grads.used) if is_there else None
            if positions is not None:
                self._noted = positions
                return
            if not self.is_kept:  # say, of narrow parameters: do not make them in vain each time
                self._kept, self._num_held = None, self._num_held + 1
        self._noted = {index: self._set(index, local) for index, local in self._locals(flat_grads)}

    def _show_more(self, shown: FlatGradients, used: frozenset[int]) -> None:
        """Let the ``.grad`` of ``used`` be what ``shown`` says; all others that it has, are."""
        self._shown = shown._replace(used=shown.used | used)
        if used <= shown.used:
            return
        more = ((i, local) for i, local in self._locals(self._shown) if i not in shown.used)
        self._noted = self._addresses | {i: self._set(i, local) for i, local in more}

    @staticmethod
    def _laid_out(flat_grads: FlatGradients, indices: tuple[int, ...]) -> FlatGradients:
        if flat_grads.layout.indices == indices:
            return flat_grads
        layout = GradientLayout(flat_grads.layout.params, indices, flat_grads.layout.device)
        return FlatGradients(layout, flat_grads.laid_out(layout), flat_grads.used)

    def _is_ours(self, index: int) -> bool:
        gradient = self._group.params[index].sharded.grad
        if self._shown is None or gradient is None or not hasattr(gradient, _OURS):
            return False  # another one may have got the memory of one of ours
        local = self._grad(index)
        return local is not None and local.data_ptr() == self._addresses.get(index, -1)

    @property
    def flat(self) -> torch.Tensor | None:
        """The flat sums, as long as they may be in use."""
        return None if self._shown is None else self._shown.flat

    def open_sum(self, new: FlatGradients) -> torch.Tensor | None:
        """Return what the caller may add ``new.flat`` to instead of ``add``, if that is the same.

        So it is where every ``.grad`` is a view of the sums, and no hook wants to see what is
        added. Call ``has_grown`` afterwards.
        """
        shown = self._shown
        if shown is None or not self._is_shown(shown, new) or self.has_hooks(new):
            return None
        dtypes = {self._group.params[index].sharded.dtype for index in shown.used | new.used}
        return shown.flat if dtypes == {shown.flat.dtype} == {new.flat.dtype} else None

    def has_hooks(self, new: FlatGradients) -> bool:
        """Whether users have put hooks on parameters that get a gradient."""
        return bool(self._look(new)[0])

    def drop_hidden(self, indices: frozenset[int]) -> None:
        """Take back what has been added to ``open_sum`` for parameters that had no ``.grad``."""
        if self._shown is not None:
            hidden = indices - self._shown.used
            self._shown._replace(used=hidden).erase(hidden)

    def has_grown(self, used: frozenset[int]) -> None:
        """Show what has been added to ``open_sum`` for some parameters."""
        shown = self._shown
        if shown is None or self._addresses != self._addresses_of(shown):
            return  # dropped or replaced since
        self._show_more(shown, used)

    def release_cleared(self) -> None:
        """Give the memory back once the user has dropped the gradients."""
        if self._shown is not None and self._is_clear():
            self._shown = None
            if self._kept is not None and not self.is_kept and not self._kept.give_back():
                self._kept = None
                self._num_held += 1

    def forget(self, indices: frozenset[int]) -> None:
        """Note that the ``.grad`` of some parameters has been cleared."""
        self.release_cleared()

    def offer(self, new: FlatGradients) -> bool:
        """Set ``offered``, if ``.grad`` would be views of it; who sets it to None has taken it.

        A step that is flat needs no gradient of a single parameter, and may cost less than those.
        """
        self.offered = new if self.takes_as_is(new) else None
        if self.offered is not None and not self.is_kept:
            self._kept, self._num_held = None, _MAX_HELD  # no .grad is needed
        return self.offered is not None

    def withdraw_offer(self) -> None:
        """Add what was offered and not taken to ``.grad``."""
        if self.offered is not None:
            offered, self.offered = self.offered, None
            self.add(offered)

    def settle(self) -> None:
        """Have all that was added in ``.grad``."""
        self.withdraw_offer()

    def show_early(self) -> bool:
        """As for ``HostGrads``; it is there."""
        self.withdraw_offer()
        return True

    def takes_as_is(self, new: FlatGradients) -> bool:
        """Whether ``add`` would show ``new`` without reading it."""
        dtypes = {self._group.params[index].sharded.dtype for index in new.used}
        hooked, is_clear = self._look(new)
        return is_clear and dtypes == {new.flat.dtype} and not hooked

    def move(self, location: MemoryLocation) -> list[torch.Tensor]:
        """Start moving every ``.grad`` to ``location``; they stay the same objects.

        Return what they were in, to be kept until the copies are over.
        """
        self._kept = None
        shown, views = self._shown, dict[int, torch.Tensor]()
        if shown is not None and self._addresses != self._addresses_of(shown):
            shown = None
        if shown is not None:
            flat = location.empty_like(shown.flat)
            flat.copy_(shown.flat, non_blocking=True)
            moved = shown._replace(flat=flat)
            views = dict(self._locals(moved))
        sources = [] if shown is None else [shown.flat]
        for index, param in enumerate(self._group.params):
            gradient, local = param.sharded.grad, self._grad(index)
            if gradient is None or local is None:
                continue
            new = views.get(index)
            if new is None or new.dtype != local.dtype:
                new = location.empty_like(local)
                new.copy_(local, non_blocking=True)
                sources.append(local)
            move_local(gradient, new)
        self._shown = None if shown is None else moved
        self._noted = {} if shown is None else self._addresses_of(moved)
        return sources

    def clear(self) -> None:
        """Drop every ``.grad``."""
        for param in self._group.params:
            param.sharded.grad = None
        self._shown = self.offered = None
        if not self.is_kept:
            self._kept = None

    def _grad(self, index: int) -> torch.Tensor | None:
        gradient = self._group.params[index].sharded.grad
        return None if gradient is None else local_of(gradient)

    def _set(self, index: int, local: torch.Tensor) -> int:
        """Make ``local`` the ``.grad`` of a parameter; return its address."""
        sharded = self._group.params[index].sharded
        if local.dtype != sharded.dtype:
            local = local.to(sharded.dtype)
        sharded.grad = gradient = wrap_like(sharded, local)
        mark_as_ours(gradient)
        return local.data_ptr()

    def _locals(self, flat_grads: FlatGradients) -> list[tuple[int, torch.Tensor]]:
        return flat_grads.shards(self._group.spec.mesh_info.shard_rank)

    def _copies(self, flat_grads: FlatGradients) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over gradients that are copies of ``flat_grads``, each with its part of it."""
        for index, wide in self._locals(flat_grads):
            grad = self._grad(index)
            if grad is not None and grad.dtype != wide.dtype:
                yield grad, wide

    def _take_edits(self, shown: FlatGradients) -> None:
        """Let the wide sums follow what the user did to the copies (clip, unscale, zero)."""
        for grad, wide in self._copies(shown):
            self._take_edit(grad, wide)

    @staticmethod
    def _take_edit(copy: torch.Tensor, wide: torch.Tensor) -> None:
        # By value, because torch's foreach kernels on DTensors raise no version counter.
        wide.copy_(torch.where(copy == wide.to(copy.dtype), wide, copy.to(wide.dtype)))

    @property
    def _addresses(self) -> dict[int, int]:
        if isinstance(self._noted, Places):
            self._noted = self._noted.addresses()
        return self._noted

    def _addresses_of(self, flat_grads: FlatGradients) -> dict[int, int]:
        grads = ((index, self._grad(index)) for index in flat_grads.used)
        return {index: grad.data_ptr() for index, grad in grads if grad is not None}

    def _is_shown(self, shown: FlatGradients, new: FlatGradients) -> bool:
        return (
            shown.layout is new.layout
            and self._addresses == self._addresses_of(shown)
            and all(self._grad(index) is None for index in new.used - shown.used)
        )

    def _look(self, new: FlatGradients) -> tuple[list[int], bool]:
        """Return which parameters in ``new`` have hooks, and whether none has a gradient."""
        hooked, is_clear = look_at(self._group.params)
        return [index for index in hooked if index in new.used] if hooked else hooked, is_clear

    def _run_tensor_hooks(self, new: FlatGradients, hooked: list[int]) -> None:
        for index, local in self._locals(new):
            if index in hooked:
                grad = run_tensor_hooks(self._group.params[index].sharded, local)
                if grad is not None:
                    self._take_edit(local_of(grad), local)
