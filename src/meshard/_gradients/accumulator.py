"""Accumulation of gradients across microbatches.

Each unit has three accumulators, all in the accumulate dtype. ``U`` holds unsharded gradients that
are not reduced. ``Q`` holds gradients that are reduced over the shard group but not across the
replicas. ``A`` is what ``.grad`` of the sharded parameters shows. ``g`` are the gradients of one
backward. ``mean_S`` is the mean over the shard group, and ``mean_R`` that over the replicas:

    NONE             U += g
    REDUCE_SCATTER   Q += mean_S(U + g);                   U = 0
    FULL             A += mean_R(Q + mean_S(U + g));       U = 0;  Q = 0

On a mesh without replicas REDUCE_SCATTER does what FULL does, but ends no window. Under
``replicate`` it does what NONE does.

A gradient may lack a sum over mesh axes of another parallelism. Under sequence parallelism, for
example, each tensor-parallel rank has the gradient of a norm for its own part of the sequence.
Under NONE each rank adds up its own terms in ``U``. The sum over those axes is taken once, of
``U``, before ``U`` is reduced. If there are hooks on arrived gradients, the sum of each gradient is
taken before they run.

Note: Each rank decides by the placements of its own gradients whether to take that sum. The ranks
    of one sum decide alike, because DTensor requires them to run the same operations. Ranks that
    use different parameters are data-parallel ranks, which are not in the same sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import InFlight, Rows
from meshard._comm.divergence import check_fingerprint, explain_failure
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._gradients.published import HostGrads, PublishedGrads, ShardedGrads, unrecorded
from meshard._gradients.replicated_grads import ReplicatedGrads
from meshard._gradients.settings import ReduceSettings, TensorHook
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._mesh.placement import MissingSum
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import UnitParams
from meshard._torch.patches import pending_holders
from meshard.foreach_reduce import ReducePlan, Reduction, early_divisor, is_narrowed_late

_MAX_LAYOUTS = 64


class GradientRules:
    """Layouts and dtypes of the gradients of one unit."""

    def __init__(
        self,
        unit_params: UnitParams,
        reduce_dtype: torch.dtype | None,  # None: what the dtypes of the gradients promote to
        accumulate_dtype: torch.dtype | None,  # None: see the method of this name
    ) -> None:
        self._unit_params = unit_params
        self.reduce_dtype = reduce_dtype
        self.chosen_dtype = accumulate_dtype
        self._layouts: dict[tuple[int, ...], GradientLayout] = {}
        self._all = tuple(range(len(unit_params.params)))
        self.everything = frozenset(self._all)
        # A cache: the layouts of the last call of ``accumulate_dtype``, and its result.
        self._widest_of: tuple[FlatLayout, GradientLayout] | None = None
        self._widest = torch.float32

    def layout_for(
        self, used: frozenset[int], accumulated: Iterable[FlatGradients | None]
    ) -> GradientLayout:
        """Return the layout of all parameters that may have a gradient on some rank.

        ``used`` are the parameters that got a gradient on this rank in this backward.
        ``accumulated`` are the gradients of earlier backwards of the window.
        """
        indices = self._all
        if used is not self.everything:
            present = used.union(*(grads.layout.indices for grads in accumulated if grads))
            indices = tuple(
                index
                for index, param in enumerate(self._unit_params.params)
                if param.sharded.requires_grad
                # A parameter that was frozen after the forward may still get a gradient.
                or param.unsharded.requires_grad
                or index in present
            )
        if indices not in self._layouts:
            # Bounded, because a user may freeze other parameters in every step.
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layouts = [param.layout for param in self._unit_params.params]
            self._layouts[indices] = GradientLayout(layouts, indices, self._unit_params.spec.device)
        return self._layouts[indices]

    def accumulate_dtype(self, gradients: GradientLayout) -> torch.dtype:
        """Return the dtype in which ``gradients`` are added up.

        By default it is the widest dtype of the shards, and at least float32. Frozen parameters do
        not count.
        """
        if self.chosen_dtype is not None:
            return self.chosen_dtype
        # The unit gets another layout when Module.double(), say, casts its parameters.
        layout, known = self._unit_params.layout, self._widest_of
        if known is None or layout is not known[0] or gradients is not known[1]:
            dtypes = [
                segment.dtype
                for segment in layout.segments
                if segment.dtype.is_floating_point
                and any(each.index in gradients.ranges for each in segment.ranges)
            ]
            self._widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
            self._widest_of = layout, gradients
        return self._widest

    def wire_dtype(self, layout: GradientLayout) -> torch.dtype:
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        dtypes = self._unit_params.compute_dtypes
        return functools.reduce(torch.promote_types, {dtypes[index] for index in layout.indices})


@dataclass(slots=True)
class Window:
    """The microbatches whose gradients are added up before an optimizer step, for one unit."""

    is_open: bool = False  # gradients were added to it, and it has not ended
    is_in_loop: bool = False  # a loop over ``microbatches`` is under way
    _has_divided: bool = False
    _factor: float | None = None

    def divide(self, factor: float | None, label: str) -> None:
        """Record the divide factor; raise a RuntimeError if the window was begun with another."""
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
        """Allow another divide factor, because all gradients that were divided are dropped."""
        self._has_divided = False

    def close(self) -> None:
        self.is_open = self._has_divided = False


class _Arrived(NamedTuple):
    """The unsharded gradients of one backward, less those that ``receive`` has added to ``U``."""

    gradients: list[torch.Tensor | None]  # one entry per parameter
    used: frozenset[int]  # the indices of those that are not None


class ReductionInFlight(NamedTuple):
    """A reduction that was started."""

    reduction: Reduction
    layout: GradientLayout
    publishes: bool  # True: its result is added to .grad; False: it is kept as the partial
    after: list[TensorHook]  # the ``after`` hooks that were registered when it started


class GradientAccumulator:
    """The accumulators of one unit, and the moves between them."""

    def __init__(self, unit_params: UnitParams, rules: GradientRules) -> None:
        self.unit_params = unit_params
        self.rules = rules
        self._unreduced: FlatGradients | None = None  # U
        self._partial: FlatGradients | None = None  # Q
        self.published = _grads_of(unit_params)  # A
        self.is_replicated = isinstance(self.published, ReplicatedGrads)
        # From parameter index to the sum over other mesh axes (TP) that its gradient in U lacks.
        self._missing_sums: dict[int, MissingSum] = {}
        self._converted = [
            i for i, param in enumerate(unit_params.params) if param.needs_conversion
        ]
        self.arrived = set[int]()  # parameters whose gradient lies in .grad of the unsharded one
        self.num_in_flight = 0
        self.has_reduced = False  # whether a reduction was ever started; the same on all ranks
        # Parameters whose gradients were cleared while a reduction was in flight.
        self._cleared_in_flight: frozenset[int] = frozenset()
        # Parameters whose gradients were cleared since gradients were last added.
        self._cleared_since_add: frozenset[int] = frozenset()
        self.window = Window()

    # --- pending gradients ------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """Whether gradients are accumulated that are not in ``.grad``."""
        return self._unreduced is not None or self._partial is not None

    @property
    def is_unreduced(self) -> bool:
        """Whether gradients are accumulated that no collective has reduced."""
        return self._unreduced is not None

    @property
    def pending(self) -> str:
        """Why gradients are not fully reduced yet, for an error; empty if all are."""
        if self._unreduced is not None:
            return "not reduced yet (GradientSync.NONE)"
        if self._partial is not None:
            return "not reduced across the replicas yet (GradientSync.REDUCE_SCATTER)"
        if self.arrived:
            return (
                "not reduced yet: a backward has brought them that did not go through the last "
                "forward of the unit"
            )
        if self.num_in_flight:
            return "still in flight (set_is_last_backward(False), or not finalized)"
        return ""

    def pending_of_params(self) -> dict[int, DTensor | None]:
        """Return an entry for each parameter with pending gradients, by index.

        It is the partial, or None if some of these gradients are not reduced at all (``U``).
        """
        mesh_info, found = self.unit_params.spec.mesh_info, dict[int, DTensor | None]()
        if self._partial is not None:
            for index, local in self._partial.shards(mesh_info.shard_rank):
                found[index] = self.unit_params.params[index].partial_of(local, mesh_info)
        if self._unreduced is not None:
            found.update(dict.fromkeys(self._unreduced.used))
        return found

    def clear(self, gone: frozenset[int]) -> None:
        """Drop pending gradients of some parameters."""
        # zero_grad() of two optimizers may clear half of the parameters each, so add up what was
        # cleared. U and Q become None once all parameters of their layout are cleared. It would not
        # do to ask only for those that this rank used: other ranks may have used more, and all
        # ranks must agree on whether gradients are pending.
        self._cleared_since_add |= gone
        for index in gone.intersection(self._missing_sums):
            del self._missing_sums[index]
        if self._unreduced is not None:
            self._unreduced = self._unreduced.without(self._cleared_since_add)
        if self._partial is not None:
            self._partial = self._partial.without(self._cleared_since_add)
        if self.published.has_arrivals:
            for index in gone:  # the user, or a pipeline schedule, may have set .grad here
                self.unit_params.params[index].unsharded.grad = None
        self.arrived -= gone
        if self.num_in_flight:
            self._cleared_in_flight |= gone
        self._end_window_if_cleared()
        self.published.drop_arriving(gone)
        self._release_if_settled()

    def _end_window_if_cleared(self) -> None:
        """End the window if ``clear`` has dropped all that was added to it."""
        params = self.unit_params.params
        published = (i for i, param in enumerate(params) if param.sharded.grad is not None)
        is_any_left = self.num_in_flight or self.is_pending
        if not is_any_left and self._cleared_since_add.issuperset(published):
            self.end_window()

    def end_window(self) -> None:
        """End the window, if one is open. The next gradients open a new one."""
        if self.window.is_open:
            self.window.close()
            self._release_if_settled()

    def _release_if_settled(self) -> None:
        # zero_grad() calls ``clear`` only while some object is held. An open window needs that call
        # even when nothing is pending, because ``clear`` closes the window. So it stays held.
        if not self.window.is_open and not self.num_in_flight and not self.is_pending:
            pending_holders.discard(self)

    def settle(self) -> None:
        """Wait for copies to host memory, and put everything that was published into ``.grad``."""
        self.published.settle()
        self._release_if_settled()

    def _open_window(self) -> None:
        self.window.is_open = True
        self._cleared_since_add = frozenset()
        pending_holders.add(self)

    def abandon(self, *, is_void: bool) -> None:
        """Drop gradients that have arrived or are in flight.

        If ``is_void`` (a backward has raised, say), drop pending gradients and ``.grad`` too.
        """
        if self.published.has_arrivals:
            for param in self.unit_params.params:
                param.unsharded.grad = None
        self.arrived.clear()
        self.num_in_flight = 0
        self._cleared_in_flight = frozenset()
        if is_void:
            self.clear(self.rules.everything)
            self.published.clear()
        self._release_if_settled()

    # --- arrived gradients ------------------------------------------------------------

    def begin_backward(self, settings: ReduceSettings) -> None:
        """Let ``receive`` put large gradients into the bucket of ``replicate`` as they arrive.

        This saves memory. Otherwise gradients would wait in ``.grad`` until the last one of the
        bucket arrives, beside their ranges of the bucket. Nothing is done unless gradients are sent
        in the accumulate dtype.
        """
        if not self.unit_params.params or self._unreduced is not None or self.num_in_flight:
            return
        layout = self.rules.layout_for(frozenset(), ())
        if not layout.packed_early:
            return
        plan = self._plan(layout, settings, over_replicas=True, divide_factor=None)
        # A factor that the user has set is read only when the reduction starts: divide by 1 now.
        divisor = plan.divided_by if settings.divide_factor is None else 1
        if plan.wire_dtype == plan.accumulate_dtype:
            self.published.begin_receiving(layout, plan.wire_dtype, divisor)

    def receive(self, index: int, settings: ReduceSettings) -> None:
        """Take a gradient that has just arrived out of ``.grad``, if it is large.

        It is added to ``U``. If there is no ``U``, it is put into the bucket, if that is free, or
        added to what is there: with reentrant checkpoints a parameter may get several gradients. If
        there are ``arrived`` hooks and a ``U``, the gradient stays in ``.grad``, because these
        hooks must see it before it is added to ``U``.
        """
        if self._unreduced is None or not _on_arrived(settings):
            self._unreduced = self.published.receive(index, self._unreduced)

    def _take(self, *, may_lack_sums: bool) -> _Arrived:
        """Take the gradients that have arrived. For ``may_lack_sums`` see ``_as_plain``."""
        params = self.unit_params.params
        self.arrived.clear()
        if not self.published.has_arrivals:
            return _Arrived([None] * len(params), frozenset())
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
        self.published.end_receiving(gradients)
        unused = [index for index, gradient in enumerate(gradients) if gradient is None]
        used = self.rules.everything
        return _Arrived(gradients, used.difference(unused) if unused else used)

    # --- sums over other axes ---------------------------------------------------------

    def _as_plain(self, index: int, gradient: torch.Tensor, *, may_lack_sum: bool) -> torch.Tensor:
        """Return a gradient as the plain tensor to be reduced.

        A DTensor may be only this rank's term of a sum over other mesh axes, such as TP. Usually
        this method takes the sum. With ``may_lack_sum`` it may return the term, and the sum of
        ``U`` is taken later. It does so only if ``U`` has no gradient of the parameter yet, or one
        that lacks the same sum.
        """
        param, unreduced = self.unit_params.params[index], self._unreduced
        missing = param.missing_sum_of(gradient) if may_lack_sum else None
        is_first = unreduced is None or index not in unreduced.used
        if missing is not None and (is_first or missing == self._missing_sums.get(index)):
            assert isinstance(gradient, DTensor)
            self._missing_sums[index] = missing
            return gradient.to_local()
        if index in self._missing_sums and unreduced is not None:
            # plain_gradient() returns the complete gradient, but what ``U`` has of this parameter
            # still lacks a sum over other mesh axes. So take that sum before the two are added.
            self._add_up(unreduced.layout, unreduced.flat, index)
        return param.plain_gradient(gradient)

    def _add_up(self, layout: GradientLayout, flat: torch.Tensor, index: int) -> None:
        """Replace a parameter's range of ``flat`` by its missing sum over other mesh axes."""
        part = layout.range_of(flat, index)
        part.copy_(self._missing_sums.pop(index).add_up(part.contiguous()))

    # --- NONE -------------------------------------------------------------------------

    def accumulate(self, settings: ReduceSettings) -> None:
        """Add the arrived gradients to ``U``, once hooks have seen them."""
        with unrecorded():
            hooks = _on_arrived(settings)
            arrived = self._take(may_lack_sums=not hooks)  # hooks must see complete sums
            layout = self.rules.layout_for(arrived.used, (self._unreduced, self._partial))
            if not layout.indices:
                return
            self._open_window()
            if self._unreduced is not None:
                self._unreduced = self._add_to(self._unreduced, layout, arrived, hooks)
                return
            dtype = self.rules.accumulate_dtype(layout)
            flat = None if self.num_in_flight else self.published.free_memory(layout, dtype)
            flat = layout.allocate(dtype) if flat is None else flat
            layout.reduce_scatter_copy_in(
                [flat], arrived.gradients, packed=self.published.place_received([flat], 1)
            )
            layout.run_hooks(hooks, flat, arrived.used)
            self._unreduced = FlatGradients(layout, flat, arrived.used)

    def _add_to(
        self,
        unreduced: FlatGradients,
        layout: GradientLayout,
        arrived: _Arrived,
        hooks: Sequence[TensorHook],
    ) -> FlatGradients:
        # A parameter that was unfrozen in this window may ask for a wider dtype.
        flat = unreduced.laid_out(layout).to(self.rules.accumulate_dtype(layout))
        if hooks:
            new = layout.allocate(flat.dtype)
            layout.reduce_scatter_copy_in([new], arrived.gradients)
            layout.run_hooks(hooks, new, arrived.used)
            flat.add_(new)
        else:
            layout.add(flat, arrived.gradients)
        return FlatGradients(layout, flat, arrived.used | unreduced.used)

    # --- REDUCE_SCATTER and FULL ------------------------------------------------------

    def start_reduce(
        self,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        ends_window: bool,
        divide_factor: float | None,
    ) -> ReductionInFlight | None:
        """Start reducing ``U`` and the arrived gradients.

        Returns None if no parameter can have a gradient. **Collective:** the ranks of missing sums
        (TP), then the shard group, then the replica group if ``over_replicas``.
        """
        # A hook on arrived gradients must see their sum over the other mesh axes (TP). Without such
        # hooks, that sum may be taken after the gradients were added to ``U``.
        may_lack_sums = self._unreduced is not None and not _on_arrived(settings)
        arrived = self._take(may_lack_sums=may_lack_sums)
        layout = self.rules.layout_for(arrived.used, (self._unreduced, self._partial))
        if not layout.indices:
            return None
        self._open_window()
        self.window.divide(divide_factor, self.unit_params.label)
        mesh_info = self.unit_params.spec.mesh_info
        publishes = over_replicas or mesh_info.replicate_group is None
        plan = self._plan(
            layout, settings, over_replicas=over_replicas, divide_factor=divide_factor
        )
        if self.unit_params.comm.is_checked:
            _check_agreement(plan, mesh_info, over_replicas=publishes, ends_window=ends_window)
        rows, used = self._pack(layout, plan, arrived, settings)
        partial = None if self._partial is None else self._partial.laid_out(layout)
        self._unreduced = self._partial = None
        reduction = Reduction(plan, rows, layout.marks_for(used), partial, self.unit_params.comm)
        self.num_in_flight += 1
        self.has_reduced = True
        after = [hook.after for hook in reversed(settings.reduce_hooks) if hook.after]
        return ReductionInFlight(reduction, layout, publishes, after)

    def _plan(
        self,
        layout: GradientLayout,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        divide_factor: float | None,
    ) -> ReducePlan:
        mesh_info, average = self.unit_params.spec.mesh_info, self.published.average
        plan = ReducePlan(
            wire_dtype=self._wire_dtype(layout, settings),
            accumulate_dtype=self.rules.accumulate_dtype(layout),
            shard_group=settings.scatter_group or mesh_info.shard_group,
            replicate_group=mesh_info.replicate_group if over_replicas else None,
            replicate_count=mesh_info.replicate_count,
            divide_factor=divide_factor,
            label=self.unit_params.label,
            average=average and functools.partial(average, layout),
        )
        # Only a large unit (``is_large``, on CPU only) may divide while it packs
        # (``early_divisor``), because it packs gradients one by one. Elsewhere one operator packs
        # most gradients, and it cannot divide. With reduce hooks packing does not divide, because
        # they may ask for undivided values. With a communication hook (``average``) it does not
        # either, because that divides by itself. All ranks decide alike: layout, settings and
        # groups are the same on all of them.
        if layout.is_large and not settings.reduce_hooks and average is None:
            shard_count = plan.shard_group.size()
            if shard_count > 1 or plan.replicate_group is not None:
                return plan._replace(divided_by=early_divisor(plan.divisors, shard_count))
        return plan

    def _wire_dtype(self, layout: GradientLayout, settings: ReduceSettings) -> torch.dtype:
        chosen = next((hook.wire_dtype for hook in settings.reduce_hooks if hook.wire_dtype), None)
        return chosen or self.rules.wire_dtype(layout)

    def _pack(
        self, layout: GradientLayout, plan: ReducePlan, arrived: _Arrived, settings: ReduceSettings
    ) -> tuple[Rows, frozenset[int]]:
        """Return ``U`` plus the arrived gradients as rows to send, and the parameters used."""
        on_arrived = _on_arrived(settings)
        before = [hook.before for hook in settings.reduce_hooks if hook.before]
        if self._unreduced is not None:
            _, flat, used = self._add_to(self._unreduced, layout, arrived, on_arrived)
            for index in sorted(self._missing_sums):
                self._add_up(layout, flat, index)
            if plan.divided_by != 1:  # a rank without U divides while it packs, below
                flat.mul_(1 / plan.divided_by)
            rows = [flat]
        else:
            used = arrived.used
            if is_narrowed_late(arrived.gradients, plan.wire_dtype):
                rows = [layout.allocate(plan.accumulate_dtype)]
            else:
                rows = self._allocate(layout, plan, as_one=bool(on_arrived or before))
            packed = self.published.place_received(rows, plan.divided_by)
            layout.reduce_scatter_copy_in(
                rows, arrived.gradients, factor=1 / plan.divided_by, packed=packed
            )
            layout.run_hooks(on_arrived, rows[0], used)
        if settings.zero_unused:
            used = frozenset(layout.indices)
        layout.run_hooks(before, rows[0], used)
        return rows, used

    def _allocate(self, layout: GradientLayout, plan: ReducePlan, *, as_one: bool) -> Rows:
        """Return memory for the rows to send: one block if ``as_one``, because hooks need that."""
        comm, wire, group = self.unit_params.comm, plan.wire_dtype, plan.shard_group
        free = self.published.free_memory(layout, wire)
        if free is not None:
            return [free]
        return comm.send_rows(
            layout.shard_numel, wire, device=layout.device, group=group, as_one=as_one
        )

    def finish_reduce(self, in_flight: ReductionInFlight) -> InFlight | None:
        """Publish the result in ``.grad``, once hooks have seen it; or keep it as ``Q``.

        If gradients live in host memory, return the copy to the host. The caller waits for it.
        """
        self.num_in_flight -= 1
        # Gradients that live in host memory are still being copied. zero_grad() must wait for these
        # copies, and does so only while some unit is held. So this unit is held until ``settle``.
        if in_flight.publishes and self.unit_params.host_copies is None:
            self._release_if_settled()
        result = self._result_of(in_flight)
        if result is None:
            self.window.forget_factor()
            self._end_window_if_cleared()
            self._release_if_settled()
            return None
        if not in_flight.publishes:
            # The partial is kept even if no rank of this shard group had a gradient. Another
            # replica may have one, and all ranks must agree on whether there are partials.
            self._partial = result
            return None
        # Hooks run even if no rank of the mesh has a gradient: a hook may communicate with ranks
        # outside of the mesh, which may have some.
        in_flight.layout.run_hooks(in_flight.after, result.flat, result.used)
        return self.published.publish(result) if result.used else None

    def _result_of(self, in_flight: ReductionInFlight) -> FlatGradients | None:
        """Return the result, less what was cleared while in flight; None if all was cleared."""
        try:
            reduced = in_flight.reduction.finish()
        except RuntimeError as error:
            explain_failure(error, f"reduction of unit {self.unit_params.label!r}")
            raise
        result = FlatGradients(in_flight.layout, reduced.shard, reduced.used)
        if self.published.average is not None:
            # The communication hook may have overwritten the -0.0 that marks unused parameters.
            in_flight.layout.mark_unused(result.flat, result.used)
        if not self._cleared_in_flight:
            return result
        dropped, self._cleared_in_flight = self._cleared_in_flight, frozenset()
        return result.without(dropped)


def _on_arrived(settings: ReduceSettings) -> list[TensorHook]:
    """Return the hooks that see the unsharded gradients of one backward."""
    return [hook.arrived for hook in settings.reduce_hooks if hook.arrived]


def _grads_of(unit_params: UnitParams) -> PublishedGrads:
    if unit_params.host_copies is not None:
        return HostGrads(unit_params)
    if isinstance(unit_params, ReplicatedParams):
        return ReplicatedGrads(unit_params)
    return ShardedGrads(unit_params)


def _check_agreement(
    plan: ReducePlan, mesh_info: MeshInfo, *, over_replicas: bool, ends_window: bool
) -> None:
    """Raise unless all ranks reduce a unit alike.

    Without this check, ranks may divide by different factors, or run different numbers of
    microbatches, and no error tells the user. In the second case, the last microbatch of one rank
    is added to the first one of another rank's next window.
    """
    groups = mesh_info.groups if over_replicas else [mesh_info.shard_group]
    factor = float(plan.divide_factor or mesh_info.shard_count * mesh_info.replicate_count)
    how = f", divided by {factor}"
    if mesh_info.replicate_group is not None:
        how = f" over {'shards and replicas' if over_replicas else 'the shards'}{how}"
    if plan.divided_by != 1:
        how += f" ({plan.divided_by} of it before the sum)"
    if ends_window:
        how += ", the last of its window"
    for group in groups:
        check_fingerprint(f"the reduction of unit {plan.label!r}{how}", group)
