"""Accumulation of gradients across microbatches.

Each unit has three accumulators. ``U`` holds unsharded gradients that are not reduced. ``Q`` (the
*partial* sum) holds gradients that are reduced over the shard group but not over the replicas.
``A`` is ``.grad`` of the sharded parameters. ``g`` stands for the gradients of one backward, and
``mean_S`` and ``mean_R`` for the means over the shard group and over the replicas:

    NONE             U += g
    REDUCE_SCATTER   Q += mean_S(U + g);                   U = 0
    FULL             A += mean_R(Q + mean_S(U + g));       U = 0;  Q = 0

On a mesh without replicas REDUCE_SCATTER does what FULL does, but ends no window (the microbatches
of one optimizer step). Under ``replicate``, REDUCE_SCATTER does what NONE does.

A gradient may lack a sum over mesh axes of another parallelism. Under sequence parallelism, for
example, each tensor-parallel rank has the gradient of a norm for its own part of the sequence.
Under NONE each rank adds up its own terms in ``U``, and ``U`` is summed over those axes once,
before it is reduced. But if the user has ``arrived`` hooks, which see the gradients of each
backward, the gradients of each backward are summed over those axes before the hooks run.

A reduction returns one flat tensor per unit in the accumulate dtype. If ``.grad`` is None, it
becomes a view of the flat tensor, or a copy if its dtype is another (that of the parameter, unless
``grad_dtype`` says otherwise). If ``.grad`` is set, even by the user, the result is added to it.

A forward computes with unsharded parameters, so autograd runs no hooks on sharded ones. The code
here runs the hooks that users register on sharded parameters (``register_hook``,
``register_post_accumulate_grad_hook``). If a loss itself uses one, autograd runs its hooks too.

Note: Each rank decides by the placements of its own gradients whether to take that sum. Ranks that
    sum together decide alike, because DTensor requires them to run the same operations. Only
    data-parallel ranks may use different parameters, and they do not sum together.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import numbers
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import Handle
from meshard._comm.divergence import check_fingerprint, explain_failure
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._gradients.zero_grad import pending_holders
from meshard._mesh.mesh_info import MeshInfo
from meshard._mesh.placement import MissingSum
from meshard._params.flat_params import FlatParams
from meshard._params.unit_params import MemoryLocation, UnitParams
from meshard._torch.dtensor import (
    gradient_dtype,
    is_placed_like,
    local_of,
    move_local,
    place_like,
)
from meshard._torch.private import accumulation_hooks_of, gradient_hooks_of, without_torch_function
from meshard.foreach_reduce import ReducePlan, Reduction, is_divide_factor, is_narrowed_late
from meshard.policies import GradientSync

_GRAD = attrgetter("grad")
_MAX_LAYOUTS = 64

TensorHook = Callable[[torch.Tensor], None]
DivideFactor = float | torch.Tensor | Callable[[], "float | torch.Tensor"]


def check_divide_factor(factor: object) -> float:
    """Return a divide factor as a float. To read a 0-d tensor, the host waits for its device."""
    if isinstance(factor, torch.Tensor) and factor.dim() == 0:
        factor = factor.item()
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(
            f"factor must be a number, a callable or a 0-d tensor, got {type(factor).__name__}."
        )
    value = float(factor)
    if not is_divide_factor(value):
        raise ValueError(f"factor must be positive and finite, got {factor} (in float32).")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class ReduceHook:
    """One registration of a hook on gradients: ``meshard.register_reduce_hook``."""

    arrived: TensorHook | None = None  # sees the unsharded gradients of each backward
    before: TensorHook | None = None  # sees their sum over microbatches, before it is reduced
    after: TensorHook | None = None  # sees the shard that is about to be added to .grad
    wire_dtype: torch.dtype | None = None  # None: as the policy says
    is_all_reduce: bool = False  # set_all_reduce_hook made it, and its next call replaces it


@dataclass(slots=True)
class ReduceSettings:
    """The settings that the reductions of a unit read. The user may change them between steps."""

    sync: GradientSync = GradientSync.FULL
    divide_factor: DivideFactor | None = None  # None: the number of ranks
    zero_unused: bool = False  # give parameters that no rank used a .grad of zeros, not None
    # How many units may have unsharded gradients in flight; None: 1 on a device, 3 on CPU.
    max_input_buffers: int | None = None
    scatter_group: dist.ProcessGroup | None = None  # for reduce-scatters; None: the shard group
    reduce_hooks: list[ReduceHook] = field(default_factory=list)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are sent, if a hook sets one; None: that of the policy."""
        return next((hook.wire_dtype for hook in self.reduce_hooks if hook.wire_dtype), None)


class GradientRules:
    """Layouts and dtypes of the gradients of one unit."""

    def __init__(
        self,
        unit_params: UnitParams,
        reduce_dtype: torch.dtype | None,  # None: the widest dtype in which parameters compute
        accumulate_dtype: torch.dtype | None,  # None: the widest of shards, at least float32
    ) -> None:
        self._unit_params = unit_params
        self.reduce_dtype = reduce_dtype
        self.chosen_dtype = accumulate_dtype
        self._layouts: dict[tuple[int, ...], GradientLayout] = {}
        self._part_layouts: dict[tuple[int, ...], GradientLayout] = {}
        self._all = tuple(range(len(unit_params.params)))
        self.everything = frozenset(self._all)

    def layout_for(
        self, used: frozenset[int], accumulated: Iterable[FlatGradients | None]
    ) -> GradientLayout:
        """Return the layout of all parameters that may have a gradient on some rank.

        ``used``: the parameters that got a gradient on this rank in this backward.
        ``accumulated``: gradients of earlier backwards that are still to be reduced.
        """
        indices = self._all
        if used is not self.everything:
            present = used.union(*(grads.layout.indices for grads in accumulated if grads))
            indices = tuple(
                index
                for index, param in enumerate(self._unit_params.params)
                if param.sharded.requires_grad
                # If only the sharded parameter was frozen after the forward, a gradient may come.
                or param.unsharded.requires_grad
                or index in present
            )
        if indices not in self._layouts:
            # The cache is bounded, because users may freeze different parameters in every step.
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
                self._part_layouts.clear()
            params = self._unit_params
            self._layouts[indices] = GradientLayout(
                [param.layout for param in params.params],
                indices,
                params.spec.device,
                at_once=not params.comm.waits_block_host,
            )
        return self._layouts[indices]

    def parts_of(self, layout: GradientLayout) -> GradientLayout | None:
        """Return the layout of this rank's row of ``layout``, as the replicas cut it once more."""
        params = self._unit_params
        if params.parts is None:
            return None
        if layout.indices not in self._part_layouts:
            self._part_layouts[layout.indices] = GradientLayout(
                params.parts.layouts, layout.indices, params.spec.device
            )
        return self._part_layouts[layout.indices]

    def accumulate_dtype(self, gradients: GradientLayout) -> torch.dtype:
        """Return the dtype in which ``gradients`` are added up.

        By default it is the widest dtype of the sharded parameters that have a place in the layout
        ``gradients`` (frozen ones mostly have none), and at least float32.
        """
        if self.chosen_dtype is not None:
            return self.chosen_dtype
        dtypes = [
            segment.dtype
            for segment in self._unit_params.layout.segments
            if segment.dtype.is_floating_point
            and any(each.index in gradients.ranges for each in segment.ranges)
        ]
        return functools.reduce(torch.promote_types, dtypes, torch.float32)

    def wire_dtype(self, layout: GradientLayout) -> torch.dtype:
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        dtypes = self._unit_params.compute_dtypes
        return functools.reduce(torch.promote_types, {dtypes[index] for index in layout.indices})


@dataclass(slots=True)
class Window:
    """The microbatches whose gradients are added up before an optimizer step, for one unit."""

    is_open: bool = False  # gradients of it were added up or reduced, and it has not ended
    is_in_loop: bool = False  # the user's loop over ``meshard.microbatches`` is under way
    _has_divided: bool = False
    _factor: float | None = None

    def divide(self, factor: float | None, label: str) -> None:
        """Record the divide factor. Raise a RuntimeError if it changes within the window."""
        if self._has_divided and factor != self._factor:
            raise RuntimeError(
                f"unit {label!r} has divided part of this window by "
                f"{self._factor or 'the number of ranks'}, and would divide the rest by "
                f"{factor or 'the number of ranks'}; a divide factor that is a "
                "callable or a tensor must give the same value for all microbatches of a window "
                "(for a count of tokens: that of the whole window)."
            )
        self._has_divided, self._factor = True, factor

    def forget_factor(self) -> None:
        """Allow another divide factor, because all gradients that were divided were dropped."""
        self._has_divided = False

    def close(self) -> None:
        self.is_open = self._has_divided = False


class Gradients(abc.ABC):
    """The gradients of one unit that are not in ``.grad`` yet, and their window of microbatches."""

    is_replicated = False

    def __init__(self, unit_params: UnitParams, rules: GradientRules) -> None:
        self.unit_params = unit_params
        self.rules = rules
        self.arrived = set[int]()  # parameters whose new gradient is not yet added up or reduced
        self.is_in_flight = False  # whether a reduction was started and has not finished
        self.reduction: Reduction | None = None  # the one in flight; always None in ``replicate``
        self.publishes = True  # whether that reduction's result goes to .grad; else it becomes Q
        self.backward = -1  # in ``replicate``: number of the last backward that filled buckets
        # Parameters that the user has cleared since gradients were last added up or reduced.
        self._cleared_since_add: frozenset[int] = frozenset()
        self.window = Window()

    # --- NONE, REDUCE_SCATTER and FULL; ``U`` and ``Q`` are explained at the top ---------

    @abc.abstractmethod
    def accumulate(self, settings: ReduceSettings) -> None:
        """Run ``arrived`` hooks on this backward's gradients. Add these to the unreduced ``U``."""

    @abc.abstractmethod
    def start_reduce(
        self,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        ends_window: bool,
        divide_factor: float | None,
    ) -> bool:
        """Start reducing the unreduced sum ``U`` plus the gradients of this backward.

        Returns False if no parameter can have a gradient. **Collective:** the ranks of sums over
        other mesh axes (TP), then the shard group, then the replica group if ``over_replicas``.
        """

    @abc.abstractmethod
    def finish_reduce(self) -> Handle | None:
        """Run ``after`` hooks on the result and add it to ``.grad``, or keep it as a partial sum.

        If ``.grad`` live in host memory, return the copy to the host. The caller must wait for it.
        """

    # --- gradients that are not in .grad yet --------------------------------------------

    @property
    @abc.abstractmethod
    def is_pending(self) -> bool:
        """Whether gradients of earlier backwards must still be reduced to go to ``.grad``."""

    @property
    @abc.abstractmethod
    def is_unreduced(self) -> bool:
        """Whether gradients of earlier backwards have been in no reduction at all."""

    @property
    def pending(self) -> str:
        """For an error message: why gradients are not in ``.grad`` yet. Empty if all are."""
        if self.is_unreduced:
            return "not reduced yet (GradientSync.NONE)"
        if self.is_pending:
            return "not reduced across the replicas yet (GradientSync.REDUCE_SCATTER)"
        if self.arrived:
            return (
                "not reduced yet: a backward has brought them that did not go through the last "
                "forward of the unit"
            )
        if self.is_in_flight:
            return "still in flight (set_is_last_backward(False), or not finalized)"
        return ""

    @abc.abstractmethod
    def pending_of_params(self) -> dict[int, DTensor | None]:
        """Map the index of each parameter whose gradients are not all in ``.grad`` to the rest.

        The rest is the mean over the shard group (``Q``), or None if a part of it is unreduced.
        """

    def clear(self, gone: frozenset[int]) -> None:
        """Drop the gradients of parameters ``gone`` that are not in ``.grad`` yet."""
        # Remember what was cleared: two optimizers may each clear half of the parameters. Sums of
        # gradients are freed only once all parameters in their layout are cleared, even those that
        # this rank did not use: all ranks must agree on whether gradients are left to reduce.
        self._cleared_since_add |= gone
        self._drop(gone)
        self.arrived -= gone
        self._end_window_if_cleared()
        self._release_if_settled()

    @abc.abstractmethod
    def _drop(self, gone: frozenset[int]) -> None:
        """Drop gradients, whether accumulated, of this backward, or being copied to ``.grad``."""

    def _end_window_if_cleared(self) -> None:
        """End the window of microbatches if ``clear`` has dropped all of its gradients."""
        params = self.unit_params.params
        published = (i for i, param in enumerate(params) if param.sharded.grad is not None)
        is_any_left = self.is_in_flight or self.is_pending or not self.are_shown
        if not is_any_left and self._cleared_since_add.issuperset(published):
            self.end_window()

    def end_window(self) -> None:
        """End the window of microbatches, if one is open. The next gradients open a new one."""
        if self.window.is_open:
            self.window.close()
            self._release_if_settled()

    def _release_if_settled(self) -> None:
        # Our patch of zero_grad() calls ``clear`` only while ``pending_holders`` is not empty. An
        # open window needs that call even if all gradients are in .grad, because the call ends it.
        if not self.window.is_open and not self.is_in_flight and not self.is_pending:
            pending_holders.discard(self)

    def settle(self) -> None:
        """Wait for copies of gradients to host memory, and put all of these into ``.grad``."""
        self._release_if_settled()

    @property
    def are_shown(self) -> bool:
        """False if gradients in a host buffer wait for ``settle`` to add them to ``.grad``."""
        return True

    def _open_window(self) -> None:
        self.window.is_open = True
        self._cleared_since_add = frozenset()
        pending_holders.add(self)

    def abandon(self, *, is_void: bool) -> None:
        """Drop the gradients of this backward and of a reduction in flight.

        If ``is_void`` (as after a backward that raised), drop all earlier ones, even in ``.grad``.
        """
        self._drop_arrived()
        self.arrived.clear()
        self.is_in_flight, self.reduction = False, None
        if is_void:
            self.clear(self.rules.everything)
            for param in self.unit_params.params:
                param.sharded.grad = None
        self._release_if_settled()

    @abc.abstractmethod
    def _drop_arrived(self) -> None:
        """Drop gradients that autograd has brought in this backward, and buckets in flight."""

    @abc.abstractmethod
    def rebuild(self) -> None:
        """Adapt to parameters that were cast, moved or replaced."""


# --- A: the .grad of sharded parameters -----------------------------------------------------


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
    """The ``.grad`` of the sharded parameters of one unit.

    If they live in host memory, reduced gradients are copied to a host buffer while the backward
    goes on. If possible, ``.grad`` become views of the buffer at once, and ``settle`` only waits
    for the copies. Otherwise (for example, ``.grad`` is set already) ``settle`` also adds the
    buffer to ``.grad``.
    """

    def __init__(self, unit_params: UnitParams) -> None:
        self._unit_params = unit_params
        self.arriving: FlatGradients | None = None  # in a host buffer, to be added to .grad

    def publish(self, new: FlatGradients) -> Handle | None:
        """Add reduced gradients to ``.grad``, which may become views of ``new``.

        In host memory, ``.grad`` is valid after ``settle``. Then this returns the copy, on
        ``CommStream.HOST``; it keeps ``new`` alive until the caller has waited for it.
        """
        copies, comm = self._unit_params.host_copies, self._unit_params.comm
        if copies is None:
            self._add(new)
            return None
        if self.arriving is not None:
            self.settle()  # so that host buffers of several backwards do not pile up
        # New memory each time, because the user may still hold the last ``.grad``. torch caches
        # pinned memory, so later steps mostly make no driver calls.
        host = self._unit_params.spec.location.empty_like(new.flat)
        copying = copies.store(host, new.flat, comm, label=self._unit_params.label)
        arriving = new._replace(flat=host)
        if self._will_read(arriving):
            self.arriving = arriving
        else:
            self._add(arriving)
        return copying

    def settle(self) -> None:
        """Wait for copies to host memory, and add what they brought to ``.grad``."""
        if self._unit_params.host_copies is not None:
            self._unit_params.host_copies.wait()
        if self.arriving is not None:
            arrived, self.arriving = self.arriving, None
            with unrecorded():  # an evaluation calls this too, perhaps under inference_mode
                self._add(arrived)

    def drop_arriving(self, gone: frozenset[int]) -> None:
        """Wait for copies in flight. Drop what ``settle`` would add to ``.grad`` of ``gone``."""
        if self._unit_params.host_copies is not None:
            self._unit_params.host_copies.wait()
        if self.arriving is not None:
            self.arriving = self.arriving.without(gone)

    def _will_read(self, new: FlatGradients) -> bool:
        """Whether ``_add`` will read values of ``new``, in a hook, a sum or a cast."""
        shards, grads, before, after = self._inspect()
        is_read = any(before) or any(after) or any(grad is not None for grad in grads)
        return is_read or any(gradient_dtype(shards[each]) != new.flat.dtype for each in new.used)

    def _add(self, new: FlatGradients) -> None:
        shards, grads, before, after = self._inspect()
        sums, added = list[torch.Tensor](), list[torch.Tensor]()
        parts, mesh_info = self._unit_params.parts, self._unit_params.spec.mesh_info
        for index, local in new.shards(mesh_info.shard_rank if parts is None else parts.rank):
            sharded, old = shards[index], grads[index]
            like = sharded if parts is None else parts.part(index)
            if hooks := before[index]:
                _run_hooks(tuple(hooks.values()), like, local, gradient_dtype(sharded))
            if old is None:
                sharded.grad = place_like(like, local.to(gradient_dtype(sharded)))
                continue
            if not is_placed_like(old, like):  # such as from a loss that used the shard itself
                old = sharded.grad = old.redistribute(like.device_mesh, like.placements)
            sums.append(local_of(old))
            added.append(local)
        if sums:
            torch._foreach_add_(sums, added)
        for index in sorted(new.used) if any(after) else ():
            for hook in tuple((after[index] or {}).values()):
                hook(shards[index])

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
    hooks: tuple[Callable[[Any], Any], ...],
    like: torch.Tensor,
    local: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Run the hooks of ``register_hook``, which may change or replace the gradient ``local``."""
    # Pass a copy, because a hook may keep the tensor that it gets.
    gradient: torch.Tensor = place_like(like, local.to(dtype, copy=True))
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    local.copy_(local_of(gradient))


# --- U and Q --------------------------------------------------------------------------------


class _Reducing(NamedTuple):
    """What ends a reduction in flight."""

    layout: GradientLayout
    used: frozenset[int]  # parameters of which this rank has sent a gradient
    after: list[TensorHook]  # hooks to run on the result, as they were when it started


class GradientAccumulator(Gradients):
    """The accumulators of one sharded unit, and the moves between them."""

    def __init__(self, unit_params: FlatParams, rules: GradientRules) -> None:
        super().__init__(unit_params, rules)
        self._params = unit_params.params
        self._unreduced: FlatGradients | None = None  # U: in no reduction yet
        self._partial: FlatGradients | None = None  # Q: reduced over the shard group only
        self._reducing: _Reducing  # about the reduction in flight
        # Parameters whose gradients the user has cleared while they were in a reduction.
        self._cleared_in_flight: frozenset[int] = frozenset()
        self.published = ShardedGrads(unit_params)  # A: .grad
        # From parameter index to the sum over other mesh axes (TP) that its part of ``U`` lacks.
        self._missing_sums: dict[int, MissingSum] = {}
        self._converted = [i for i, param in enumerate(self._params) if param.needs_conversion]

    @property
    def is_pending(self) -> bool:
        return self._unreduced is not None or self._partial is not None

    @property
    def is_unreduced(self) -> bool:
        return self._unreduced is not None

    def pending_of_params(self) -> dict[int, DTensor | None]:
        mesh_info, found = self.unit_params.spec.mesh_info, dict[int, DTensor | None]()
        if self._partial is not None:
            for index, local in self._partial.shards(mesh_info.shard_rank):
                found[index] = self._params[index].partial_of(local, mesh_info)
        if self._unreduced is not None:
            found.update(dict.fromkeys(self._unreduced.used))
        return found | dict.fromkeys(self.arrived)

    def _drop(self, gone: frozenset[int]) -> None:
        if self.is_in_flight:
            self._cleared_in_flight |= gone
        for index in gone.intersection(self._missing_sums):
            del self._missing_sums[index]
        if self._unreduced is not None:
            self._unreduced = self._unreduced.without(self._cleared_since_add)
        if self._partial is not None:
            self._partial = self._partial.without(self._cleared_since_add)
        for index in gone:  # the user, or a pipeline schedule, may have set .grad here
            self._params[index].unsharded.grad = None
        self.published.drop_arriving(self._cleared_since_add)

    def settle(self) -> None:
        self.published.settle()
        super().settle()

    @property
    def are_shown(self) -> bool:
        return self.published.arriving is None

    def _drop_arrived(self) -> None:
        self._cleared_in_flight = frozenset()
        for param in self._params:
            param.unsharded.grad = None

    def rebuild(self) -> None: ...

    # --- gradients of the present backward --------------------------------------------

    def _take(self, *, may_lack_sums: bool) -> tuple[list[torch.Tensor | None], frozenset[int]]:
        """Take this backward's gradients: one entry per parameter, and which are not None.

        With ``may_lack_sums``, some may lack their sum over other mesh axes, such as TP.
        """
        params = self._params
        self.arrived.clear()
        gradients = [param.unsharded.grad for param in params]
        for index, param in enumerate(params):
            gradient = gradients[index]
            if gradient is not None:
                param.unsharded.grad = None
                if gradient.is_sparse:
                    gradients[index] = gradient.to_dense()
        for index in self._converted:
            gradient = gradients[index]
            if gradient is not None:
                gradients[index] = self._as_plain(index, gradient, may_lack_sum=may_lack_sums)
        unused = [index for index, gradient in enumerate(gradients) if gradient is None]
        used = self.rules.everything
        return gradients, used.difference(unused) if unused else used

    # --- sums over other axes ---------------------------------------------------------

    def _as_plain(self, index: int, gradient: torch.Tensor, *, may_lack_sum: bool) -> torch.Tensor:
        """Return a gradient as the plain tensor to be reduced.

        A DTensor may be only this rank's term of a sum over other mesh axes, such as TP. Usually
        this method takes the sum. With ``may_lack_sum`` it returns the term, to be added to the
        unreduced sum ``U``, and ``U`` is summed over these axes later. But it takes the sum now if
        ``U`` already has a gradient of the parameter that does not lack this sum.
        """
        param, unreduced = self._params[index], self._unreduced
        missing = param.missing_sum_of(gradient) if may_lack_sum else None
        is_first = unreduced is None or index not in unreduced.used
        if missing is not None and (is_first or missing == self._missing_sums.get(index)):
            assert isinstance(gradient, DTensor)
            self._missing_sums[index] = missing
            return gradient.to_local()
        if index in self._missing_sums and unreduced is not None:
            # plain_gradient() returns a complete gradient, but the gradient in ``U`` still lacks a
            # sum over other mesh axes. So take that sum before the two gradients are added.
            self._add_up(unreduced.layout, unreduced.flat, index)
        return param.plain_gradient(gradient)

    def _add_up(self, layout: GradientLayout, flat: torch.Tensor, index: int) -> None:
        """Sum a parameter's gradient in ``flat`` over the mesh axes that it lacks, in place."""
        part = layout.range_of(flat, index)
        part.copy_(self._missing_sums.pop(index).add_up(part.contiguous()))

    # --- NONE -------------------------------------------------------------------------

    def accumulate(self, settings: ReduceSettings) -> None:
        with unrecorded():
            hooks, old = on_arrived(settings), self._unreduced
            # Hooks must see gradients that are summed over all mesh axes of other parallelisms.
            gradients, used = self._take(may_lack_sums=not hooks)
            layout = self.rules.layout_for(used, (old, self._partial))
            if not layout.indices:
                return
            self._open_window()
            dtype = self.rules.accumulate_dtype(layout)
            if old is not None:
                # A parameter that was unfrozen since the last backward may need a wider dtype.
                flat = old.laid_out(layout).to(dtype)
                if hooks:
                    new = layout.allocate(dtype)
                    layout.reduce_scatter_copy_in(new, gradients, used)
                    layout.run_hooks(hooks, new, used)
                    flat.add_(new)
                    gradients = [None] * len(gradients)
                used |= old.used
                layout.add(flat, gradients, used)
            else:
                flat = layout.allocate(dtype)
                layout.reduce_scatter_copy_in(flat, gradients, used)
                layout.run_hooks(hooks, flat, used)
            self._unreduced = FlatGradients(layout, flat, used)

    # --- REDUCE_SCATTER and FULL ------------------------------------------------------

    def start_reduce(
        self,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        ends_window: bool,
        divide_factor: float | None,
    ) -> bool:
        if self._unreduced is not None:
            self.accumulate(settings)
            layout, flat, used = self._unreduced
        else:
            gradients, used = self._take(may_lack_sums=False)
            layout, flat = self.rules.layout_for(used, (self._partial,)), None
        if not layout.indices:
            return False
        self._open_window()
        self.window.divide(divide_factor, self.unit_params.label)
        hooks, mesh_info = settings.reduce_hooks, self.unit_params.spec.mesh_info
        self.publishes = over_replicas or mesh_info.replicate_group is None
        plan = ReducePlan(
            wire_dtype=settings.wire_dtype or self.rules.wire_dtype(layout),
            accumulate_dtype=self.rules.accumulate_dtype(layout),
            shard_group=settings.scatter_group or mesh_info.shard_group,
            replicate_group=mesh_info.replicate_group if over_replicas else None,
            replicate_count=mesh_info.replicate_count,
            divide_factor=divide_factor,
            label=self.unit_params.label,
            parts=self.rules.parts_of(layout) if over_replicas else None,
        )
        if self.unit_params.comm.is_checked:
            _check_agreement(plan, mesh_info, over_replicas=self.publishes, ends_window=ends_window)
        comm, arrived = self.unit_params.comm, on_arrived(settings)
        before = [hook.before for hook in hooks if hook.before]
        if flat is not None:
            for index in sorted(self._missing_sums):
                self._add_up(layout, flat, index)
            rows = flat
        elif is_narrowed_late(gradients, plan.wire_dtype):
            rows = layout.allocate(plan.accumulate_dtype)
        elif arrived or before:  # hooks may communicate, before this memory is sent
            rows = layout.allocate(plan.wire_dtype)
        else:
            rows = comm.send_memory(
                layout.row_numel, plan.wire_dtype, device=layout.device, group=plan.shard_group
            )
        if flat is None:
            layout.reduce_scatter_copy_in(rows, gradients, used)
            layout.run_hooks(arrived, rows, used)
        if settings.zero_unused and used != self.rules.everything:
            used = frozenset(layout.indices)
            layout.write_counts(rows, used)
        layout.run_hooks(before, rows, used)
        partial = None if self._partial is None else self._partial.laid_out(layout)
        self._unreduced = self._partial = None
        self.reduction, self.is_in_flight = Reduction(plan, layout, rows, partial, comm), True
        after = [hook.after for hook in reversed(hooks) if hook.after]
        self._reducing = _Reducing(plan.parts or layout, used, after)
        return True

    def finish_reduce(self) -> Handle | None:
        assert self.reduction is not None
        (layout, used, after), self.is_in_flight = self._reducing, False
        try:
            flat = self.reduction.finish()
        except RuntimeError as error:
            explain_failure(error, f"reduction of unit {self.unit_params.label!r}")
            raise
        self.reduction = None
        whole = FlatGradients(layout, flat, layout.used_anywhere(flat, used))
        result = whole.without(self._cleared_in_flight) if self._cleared_in_flight else whole
        self._cleared_in_flight = frozenset()
        if result is None:
            self.window.forget_factor()
            self._end_window_if_cleared()
            return None
        if not self.publishes:
            # Keep the partial sum even if no rank of this shard group had a gradient. Another
            # replica may have one, and all ranks must agree on whether there is a partial sum.
            self._partial = result
            return None
        # Run hooks even if no rank of the mesh has a gradient: a hook may communicate with ranks
        # outside of the mesh, which may have gradients.
        layout.run_hooks(after, result.flat, result.used)
        copying = self.published.publish(result) if result.used else None
        # If .grad live in host memory, stay in ``pending_holders`` until ``settle`` has waited for
        # the copies: zero_grad() waits for copies only while ``pending_holders`` is not empty.
        if self.unit_params.host_copies is None:
            self._release_if_settled()
        return copying


def on_arrived(settings: ReduceSettings) -> list[TensorHook]:
    """Return the user's hooks that see the unsharded gradients of each backward."""
    return [hook.arrived for hook in settings.reduce_hooks if hook.arrived]


def _check_agreement(
    plan: ReducePlan, mesh_info: MeshInfo, *, over_replicas: bool, ends_window: bool
) -> None:
    """Raise unless all ranks reduce a unit over the same groups, by the same divide factor.

    They must also agree on whether this is the last reduction before the optimizer step. If one
    rank ran fewer microbatches than another, then its first microbatch of the next step would be
    reduced together with the other rank's last microbatch of this step, without an error.
    """
    groups = mesh_info.groups if over_replicas else [mesh_info.shard_group]
    factor = float(plan.divide_factor or mesh_info.shard_count * mesh_info.replicate_count)
    how = f", divided by {factor}"
    if mesh_info.replicate_group is not None:
        how = f" over {'shards and replicas' if over_replicas else 'the shards'}{how}"
    if ends_window:
        how += ", the last of its window"
    for group in groups:
        check_fingerprint(f"the reduction of unit {plan.label!r}{how}", group)
