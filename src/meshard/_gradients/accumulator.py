"""Accumulation of gradients across microbatches.

Each unit has three accumulators, all in the accumulate dtype: ``U`` holds unsharded gradients that
are not reduced, ``Q`` gradients that are reduced over the shard group but not across the replicas,
and ``A`` is the ``.grad`` of the sharded parameters. With ``g`` the gradients of one backward:

    NONE             U += g
    REDUCE_SCATTER   Q += mean_S(U + g);                   U = 0
    FULL             A += mean_R(Q + mean_S(U + g));       U = 0;  Q = 0

A gradient may lack a sum over axes of another parallelism: that of a norm under sequence
parallelism is partial over tensor parallelism. In a window of several microbatches ``U`` adds up
what this rank has, and the sum over those axes is taken of ``U`` once, before it is reduced.

Note: Whether that sum is taken is decided by the placements of this rank's gradients. They are the
    same on all ranks that take part in it, because these run the same operations on DTensors, which
    DTensor needs anyway. Ranks that may use other parameters, along data-parallel axes, are not
    among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import InFlight, Rows
from meshard._comm.divergence import check_fingerprint, explain_failure
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout, copy_multiplied
from meshard._gradients.host_grads import HostGrads
from meshard._gradients.reduce_plan import GradientRules, ReduceSettings, TensorHook
from meshard._gradients.replicated_grads import ReplicatedGrads
from meshard._gradients.sharded_grads import ShardedGrads, unrecorded
from meshard._mesh.mesh_info import MeshInfo
from meshard._mesh.placement import MissingSum
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import UnitParams
from meshard._torch.patches import hold_pending, release_pending
from meshard.foreach_reduce import ReducePlan, Reduction, early_divisor, is_narrowed_late


@dataclass(slots=True)
class Window:
    """The microbatches whose gradients are added up before an optimizer step, for one unit."""

    is_open: bool = False  # some backward was not FULL, and no FULL one has followed
    _has_divided: bool = False
    _factor: float | None = None

    def divide(self, factor: float | None, label: str) -> None:
        """Record the divide factor, or raise a RuntimeError: the window was begun with another."""
        if self._has_divided and factor != self._factor:
            raise RuntimeError(
                f"unit {label!r} has divided part of this window by "
                f"{self._factor or 'the number of ranks'}, and would divide the rest by "
                f"{factor or 'the number of ranks'}; a divide factor that is a "
                "callable or a tensor must give the same value for all microbatches of a window "
                "(for a count of tokens: that of the whole window)."
            )
        self._has_divided, self._factor = True, factor

    def close(self) -> None:
        """Begin a new window with the next gradients."""
        self.is_open = self._has_divided = False


@dataclass(slots=True, eq=False)
class _EarlyPacking:
    """The bucket, to which large gradients are moved as they arrive in a backward."""

    layout: GradientLayout
    flat: torch.Tensor
    parts: dict[int, torch.Tensor]  # views of the bucket, in the shapes of the parameters
    divisor: int  # by which they are divided on the way
    arrived: set[int] = field(default_factory=set)


class _Arrived(NamedTuple):
    """The unsharded gradients of one backward."""

    gradients: list[torch.Tensor | None]  # one entry per parameter
    used: frozenset[int]  # the indices of those that are not None
    early: _EarlyPacking | None = None  # where some of them lie already

    def before_packing(self, rows: Rows, divisor: int) -> AbstractSet[int]:
        """Return the parameters whose gradients are in ``rows`` already, and need not be packed.

        They are divided by ``divisor`` here, if they were not when they arrived. Gradients that
        arrived in other memory than ``rows`` are put into ``gradients``, undivided.
        """
        early = self.early
        if early is None or not early.arrived:
            return frozenset()
        is_in_place = rows[0].data_ptr() == early.flat.data_ptr()
        factor = early.divisor / (divisor if is_in_place else 1)
        for index in early.arrived if factor != 1 else ():
            early.parts[index].mul_(factor)
        if is_in_place:
            return early.arrived
        for index in early.arrived:
            self.gradients[index] = early.layout.part_of(early.flat, index)
        return frozenset()


class ReductionInFlight(NamedTuple):
    """A reduction that was started."""

    reduction: Reduction
    layout: GradientLayout
    publishes: bool  # its result goes to .grad, not to the partial


class GradientAccumulator:
    """The accumulators of one unit, and the moves between them."""

    def __init__(self, storage: UnitParams, rules: GradientRules) -> None:
        self.storage = storage
        self.rules = rules
        self._unreduced: FlatGradients | None = None  # U
        self._partial: FlatGradients | None = None  # Q
        self.sharded = _grads_of(storage)  # A
        self.bucket = self.sharded if isinstance(self.sharded, ReplicatedGrads) else None
        self._early: _EarlyPacking | None = None  # in a backward
        self._adds_early = False  # likewise, to what is not reduced
        self._missing_sums: dict[int, MissingSum] = {}  # over other axes, of gradients in U
        self._converted = [i for i, param in enumerate(storage.params) if param.needs_conversion]
        self.num_in_flight = 0
        self.has_reduced = False  # ever; the same on all ranks
        self._dropped: frozenset[int] = frozenset()  # cleared while they were in flight
        self._cleared: frozenset[int] = frozenset()  # since something was last accumulated
        # A communication hook: averages a buffer over the replicas, in place of the all-reduce.
        self.average: Callable[[GradientLayout, torch.Tensor], None] | None = None
        self.window = Window()

    def for_copy(self, storage: UnitParams) -> GradientAccumulator:
        """Return the accumulator of a copy of the unit. Only ``.grad`` is copied with it."""
        rules = GradientRules(storage, self.rules.reduce_dtype, self.rules.chosen_dtype)
        copied = GradientAccumulator(storage, rules)
        copied.window = dataclasses.replace(self.window)
        return copied

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
        """What is missing before accumulated gradients are in ``.grad``; empty if nothing is."""
        if self._unreduced is not None:
            return "not reduced yet (GradientSync.NONE)"
        if self._partial is not None:
            return "not reduced across the replicas yet (GradientSync.REDUCE_SCATTER)"
        if self.num_in_flight:
            return "still in flight (set_is_last_backward(False), or not finalized)"
        return ""

    def pending_of_params(self) -> dict[int, DTensor | None]:
        """Return the partial of each parameter that has one; None for unreduced gradients."""
        mesh_info, found = self.storage.spec.mesh_info, dict[int, DTensor | None]()
        if self._partial is not None:
            for index, local in self._partial.shards(mesh_info.shard_rank):
                found[index] = self.storage.params[index].partial_of(local, mesh_info)
        if self._unreduced is not None:
            found.update(dict.fromkeys(self._unreduced.used))
        return found

    def clear(self, gone: frozenset[int]) -> None:
        """Drop pending gradients of some parameters."""
        # Several optimizers may each clear a part. What counts must be the same on all ranks: the
        # cleared parameters, not those of them that this rank used.
        self._cleared |= gone
        for index in gone.intersection(self._missing_sums):
            del self._missing_sums[index]
        if self._early is not None:
            self._early.arrived -= gone
        if self._unreduced is not None:
            self._unreduced = self._unreduced.without(self._cleared)
        if self._partial is not None:
            self._partial = self._partial.without(self._cleared)
        if self._has_arrivals:
            for index in gone:  # set by hand, after unshard()
                self.storage.params[index].unsharded.grad = None
        if self.num_in_flight:
            self._dropped |= gone
        elif not self.is_pending:
            self.window.close()
        if isinstance(self.sharded, HostGrads):
            self.sharded.drop_arriving(gone)
        self._release_if_settled()

    def _release_if_settled(self) -> None:
        if not self.is_pending and not self.num_in_flight:
            release_pending(self)

    def settle(self) -> None:
        """Put into ``.grad`` everything that was published, also what is copied to the host."""
        self.sharded.settle()
        self._release_if_settled()

    def _open_window(self) -> None:
        self.window.is_open = True
        self._cleared = frozenset()
        hold_pending(self)

    def abandon(self, *, is_void: bool) -> None:
        """Forget what arrived and what is in flight; if void, drop ``.grad`` and all else."""
        if self._has_arrivals:
            for param in self.storage.params:
                param.unsharded.grad = None
        self.num_in_flight = 0
        self._dropped = frozenset()
        self._early, self._adds_early = None, False
        if is_void:
            self.clear(self.rules.everything)
            self.sharded.clear()
        self._release_if_settled()

    # --- arrived gradients ------------------------------------------------------------

    @property
    def _has_arrivals(self) -> bool:
        # Outside of a backward, .grad of replicated parameters are those that were published.
        return self.bucket is None or self.bucket.is_hidden

    def begin_backward(self, settings: ReduceSettings) -> None:
        """Choose where large gradients of a bucket go as they arrive, lest all exist twice.

        To the sum of the window, or to the bucket, unless a dtype or a hook wants other memory.
        """
        self._early, self._adds_early = None, False
        if self._unreduced is not None:
            self._adds_early = not any(hook.arrived for hook in settings.reduce_hooks)
        elif self.storage.params:
            layout, dtype = self.rules.layout_for(frozenset(), ()), self.rules.accumulate_dtype
            if layout.packed_early and dtype == self._wire_dtype(layout, settings):
                flat = self._free_bucket(layout, dtype)
                if flat is not None and self.bucket is not None:
                    divisor = self._usual_divisor(layout, settings)
                    self._early = _EarlyPacking(layout, flat, self.bucket.parts, divisor)

    def pack_arrived(self, index: int) -> None:
        """Pack a gradient that has just arrived, if it is large. Another part may follow it."""
        early, unreduced = self._early, self._unreduced if self._adds_early else None
        into = early or unreduced
        param = self.storage.params[index]
        gradient = param.unsharded.grad
        if into is None or index not in into.layout.packed_early or gradient is None:
            return
        param.unsharded.grad = None
        with unrecorded():
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if unreduced is not None:
                part = into.layout.part_of(into.flat, index)
                part.add_(param.own_part_of(gradient))
                self._unreduced = unreduced._replace(used=unreduced.used | {index})
            elif early is not None and index in early.arrived:
                early.parts[index].add_(gradient, alpha=1 / early.divisor)
            elif early is not None:
                copy_multiplied(early.parts[index], gradient, 1 / early.divisor)
                early.arrived.add(index)

    def _take(self, *, may_lack_sums: bool) -> _Arrived:
        """Take the gradients that have arrived; those for ``U`` may lack sums over other axes."""
        for index in self._early.arrived if self._early is not None else ():
            self.pack_arrived(index)  # the last part, with which the gradients were complete
        early, self._early, self._adds_early = self._early, None, False
        params = self.storage.params
        if not self._has_arrivals:
            return _Arrived([None] * len(params), frozenset())
        gradients: list[torch.Tensor | None] = []
        missing = []
        for index, param in enumerate(params):
            gradient = param.unsharded.grad
            if gradient is None:
                missing.append(index)
            else:
                param.unsharded.grad = None
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
            gradients.append(gradient)
        for index in self._converted:
            gradient = gradients[index]
            if gradient is not None:
                if may_lack_sums:
                    gradients[index] = self._part_for_sum(index, gradient)
                else:
                    self._add_up_before(index)
                    gradients[index] = params[index].own_part_of(gradient)
        if early is not None:
            missing = [index for index in missing if index not in early.arrived]
        used = self.rules.everything
        return _Arrived(gradients, used.difference(missing) if missing else used, early)

    # --- sums over other axes ---------------------------------------------------------

    def _part_for_sum(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what is added to ``U`` of a gradient: this rank's part, if all lack one sum."""
        param = self.storage.params[index]
        missing = param.missing_sum_of(gradient)
        is_first = self._unreduced is None or index not in self._unreduced.used
        if missing is not None and (is_first or missing == self._missing_sums.get(index)):
            assert isinstance(gradient, DTensor)
            self._missing_sums[index] = missing
            return gradient.to_local()
        self._add_up_before(index)
        return param.own_part_of(gradient)

    def _add_up_before(self, index: int) -> None:
        """Take the sum that ``U`` lacks of a parameter: another gradient does not lack it."""
        if index in self._missing_sums and self._unreduced is not None:
            self._add_up(self._unreduced.layout, self._unreduced.flat, index)

    def _add_up(self, layout: GradientLayout, flat: torch.Tensor, index: int) -> None:
        part = layout.range_of(flat, index)
        part.copy_(self._missing_sums.pop(index).add_up(part.contiguous()))

    # --- NONE -------------------------------------------------------------------------

    def accumulate(self, hooks: Sequence[TensorHook] = ()) -> None:
        """Add the arrived gradients to ``U``, once ``hooks`` have seen them."""
        arrived = self._take(may_lack_sums=not hooks)  # which see sums
        layout = self.rules.layout_for(arrived.used, (self._unreduced, self._partial))
        if not layout.indices:
            return
        self._open_window()
        if self._unreduced is not None:
            self._unreduced = self._add_to(self._unreduced, layout, arrived, hooks)
            return
        dtype = self.rules.accumulate_dtype
        flat = self._free_bucket(layout, dtype)
        flat = layout.allocate(dtype) if flat is None else flat
        layout.pack([flat], arrived.gradients, packed=arrived.before_packing([flat], 1))
        layout.run_hooks(hooks, flat, arrived.used)
        self._unreduced = FlatGradients(layout, flat, arrived.used)

    def _free_bucket(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        if self.bucket is None or self.num_in_flight or self.is_pending:
            return None
        return self.bucket.free_bucket(layout, dtype)

    @staticmethod
    def _add_to(
        unreduced: FlatGradients,
        layout: GradientLayout,
        arrived: _Arrived,
        hooks: Sequence[TensorHook],
    ) -> FlatGradients:
        flat = unreduced.laid_out(layout)
        if hooks:
            new = layout.allocate(flat.dtype)
            layout.pack([new], arrived.gradients)
            layout.run_hooks(hooks, new, arrived.used)
            flat.add_(new)
        else:
            layout.add(flat, arrived.gradients)
        return FlatGradients(layout, flat, arrived.used | unreduced.used)

    # --- REDUCE_SCATTER and FULL ------------------------------------------------------

    def start_reduce(
        self, settings: ReduceSettings, *, over_replicas: bool, divide_factor: float | None
    ) -> ReductionInFlight | None:
        """Start reducing ``U`` and the arrived gradients.

        **Collective:** the shard group, then the replica group if ``over_replicas``.
        """
        is_window = self._unreduced is not None
        has_hooks = any(hook.arrived for hook in settings.reduce_hooks)  # which see sums
        arrived = self._take(may_lack_sums=is_window and not has_hooks)
        layout = self.rules.layout_for(arrived.used, (self._unreduced, self._partial))
        if not layout.indices:
            return None
        self.window.divide(divide_factor, self.storage.label)
        self._open_window()
        if over_replicas:
            self.window.close()
        mesh_info = self.storage.spec.mesh_info
        plan = self._plan(
            layout, settings, over_replicas=over_replicas, divide_factor=divide_factor
        )
        if layout.is_large:  # a small unit is packed by one kernel, which divides nothing
            plan = plan._replace(divided_by=self._early_divisor(plan, settings))
        if self.storage.comm.is_checked:
            _check_agreement(plan, mesh_info)
        rows, used = self._pack(layout, plan, arrived, settings)
        partial = None if self._partial is None else self._partial.laid_out(layout)
        self._unreduced = self._partial = None
        reduction = Reduction(plan, rows, layout.marks_for(used), partial, self.storage.comm)
        self.num_in_flight += 1
        self.has_reduced = True
        publishes = over_replicas or mesh_info.replicate_group is None
        return ReductionInFlight(reduction, layout, publishes)

    def _plan(
        self,
        layout: GradientLayout,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        divide_factor: float | None,
    ) -> ReducePlan:
        mesh_info = self.storage.spec.mesh_info
        return ReducePlan(
            wire_dtype=self._wire_dtype(layout, settings),
            accumulate_dtype=self.rules.accumulate_dtype,
            shard_group=settings.scatter_group or mesh_info.shard_group,
            replicate_group=mesh_info.replicate_group if over_replicas else None,
            replicate_count=mesh_info.replicate_count,
            divide_factor=divide_factor,
            label=self.storage.label,
            average=self.average and functools.partial(self.average, layout),
        )

    @staticmethod
    def _early_divisor(plan: ReducePlan, settings: ReduceSettings) -> int:
        """Return by what gradients are divided while they are packed; 1 if others see them then.

        This is the same on all ranks: it reads settings and groups, never what this rank holds.
        """
        if settings.reduce_hooks or plan.average is not None:
            return 1
        shard_count = plan.shard_group.size()
        if shard_count == 1 and plan.replicate_group is None:
            return 1
        return early_divisor(plan.divisors, shard_count)

    def _usual_divisor(self, layout: GradientLayout, settings: ReduceSettings) -> int:
        """Return by what gradients are divided early, unless the user's factor says otherwise."""
        if settings.divide_factor is not None:  # it is resolved when a reduction starts
            return 1
        plan = self._plan(layout, settings, over_replicas=True, divide_factor=None)
        return self._early_divisor(plan, settings)

    def _wire_dtype(self, layout: GradientLayout, settings: ReduceSettings) -> torch.dtype:
        chosen = next((hook.wire_dtype for hook in settings.reduce_hooks if hook.wire_dtype), None)
        return chosen or self.rules.wire_dtype(layout)

    def _pack(
        self, layout: GradientLayout, plan: ReducePlan, arrived: _Arrived, settings: ReduceSettings
    ) -> tuple[Rows, frozenset[int]]:
        """Return ``U`` and the arrived gradients in memory to send from, and which there are."""
        on_arrived = [hook.arrived for hook in settings.reduce_hooks if hook.arrived]
        before = [hook.before for hook in settings.reduce_hooks if hook.before]
        if self._unreduced is not None:
            _, flat, used = self._add_to(self._unreduced, layout, arrived, on_arrived)
            for index in sorted(self._missing_sums):
                self._add_up(layout, flat, index)
            if plan.divided_by != 1:  # ranks without an accumulator divide while they pack
                flat.mul_(1 / plan.divided_by)
            rows = [flat]
        else:
            used = arrived.used
            if is_narrowed_late(arrived.gradients, plan.wire_dtype):
                rows = [layout.allocate(plan.accumulate_dtype)]
            else:
                rows = self._allocate(layout, plan, as_one=bool(on_arrived or before))
            packed = arrived.before_packing(rows, plan.divided_by)
            layout.pack(rows, arrived.gradients, factor=1 / plan.divided_by, packed=packed)
            layout.run_hooks(on_arrived, rows[0], used)
        if settings.zero_unused:
            used = frozenset(layout.indices)
        layout.run_hooks(before, rows[0], used)
        return rows, used

    def _allocate(self, layout: GradientLayout, plan: ReducePlan, *, as_one: bool) -> Rows:
        """Return uninitialised memory to send from; in one block if hooks are to see it."""
        comm, wire, group = self.storage.comm, plan.wire_dtype, plan.shard_group
        bucket = self._free_bucket(layout, wire)
        if bucket is not None:
            return [bucket]
        return comm.send_rows(
            layout.shard_numel, wire, device=layout.device, group=group, as_one=as_one
        )

    def finish_reduce(
        self, in_flight: ReductionInFlight, after: Sequence[TensorHook] = ()
    ) -> InFlight | None:
        """Publish a result in ``.grad``, once the hooks ``after`` have seen it; or add it to ``Q``.

        Return the copy of the gradients to the host, if they live there. The caller waits for it.
        """
        self.num_in_flight -= 1
        if in_flight.publishes and self.storage.host_copies is None:  # else not in .grad yet
            self._release_if_settled()
        try:
            reduced = in_flight.reduction.finish()
        except RuntimeError as error:
            explain_failure(error, f"reduction of unit {self.storage.label!r}")
            raise
        result = FlatGradients(in_flight.layout, reduced.shard, reduced.used)
        if self.average is not None:
            in_flight.layout.mark_unused(result.flat, result.used)  # it has written there too
        if self._dropped:
            dropped, self._dropped = self._dropped, frozenset()
            kept = result.without(dropped)
            if kept is None:
                if not self.is_pending:
                    self.window.close()
                self._release_if_settled()
                return None
            result = kept
        if not in_flight.publishes:
            # Also when no rank of this shard group had a gradient: another replica may have one.
            self._partial = result
            return None
        # Also without a gradient: the hook may communicate.
        in_flight.layout.run_hooks(after, result.flat, result.used)
        return self.sharded.publish(result) if result.used else None


def _grads_of(storage: UnitParams) -> ShardedGrads | HostGrads | ReplicatedGrads:
    if storage.host_copies is not None:
        return HostGrads(storage)
    if isinstance(storage, ReplicatedParams):
        return ReplicatedGrads(storage)
    return ShardedGrads(storage)


def _check_agreement(plan: ReducePlan, mesh_info: MeshInfo) -> None:
    """Raise unless all ranks reduce a unit alike: a wrong divisor shows in no collective."""
    over_replicas = plan.replicate_group is not None or mesh_info.replicate_group is None
    groups = mesh_info.groups if over_replicas else [mesh_info.shard_group]
    factor = float(plan.divide_factor or mesh_info.shard_count * mesh_info.replicate_count)
    how = f", divided by {factor}"
    if mesh_info.replicate_group is not None:
        how = f" over {'shards and replicas' if over_replicas else 'the shards'}{how}"
    if plan.divided_by != 1:
        how += f" ({plan.divided_by} of it before the sum)"
    for group in groups:
        check_fingerprint(f"the reduction of unit {plan.label!r}{how}", group)
