"""Accumulation of gradients across microbatches.

Each unit has three accumulators, all in the accumulate dtype: ``U`` holds unsharded gradients that
are not reduced, ``Q`` gradients that are reduced over the shard group but not across the replicas,
and ``A`` is the ``.grad`` of the sharded parameters. With ``g`` the gradients of one backward:

    NONE             U += g
    REDUCE_SCATTER   Q += mean_S(U + g);                   U = 0
    FULL             A += mean_R(Q + mean_S(U + g));       U = 0;  Q = 0
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import CommStream, InFlight, Rows
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._gradients.host_grads import HostGrads
from meshard._gradients.reduce_plan import GradientRules, ReduceSettings, TensorHook
from meshard._gradients.replicated_grads import ReplicatedGrads
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import UnitParams
from meshard._torch.patches import hold_pending, release_pending
from meshard.foreach_reduce import ReducePlan, Reduction, is_narrowed_late

Args = ParamSpec("Args")
Result = TypeVar("Result")


def unrecorded(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return ``function`` as ``torch.no_grad()`` would, at no cost inside a backward.

    A backward records nothing but under ``create_graph``, and entering ``torch.no_grad`` takes a
    dozen calls.
    """

    @functools.wraps(function)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


@dataclass(slots=True)
class Window:
    """The microbatches whose gradients are added up before an optimizer step, for one unit.

    Attributes:
        is_open: Some backward was not FULL, and no FULL one has followed.
    """

    is_open: bool = False
    _has_divided: bool = False
    _factor: float | None = None

    def divide(self, factor: float | None, label: str) -> None:
        """Record that gradients are divided by ``factor``; None: the number of ranks.

        Raises:
            RuntimeError: The window was begun with another factor.
        """
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


class _Arrived(NamedTuple):
    """The unsharded gradients of one backward."""

    gradients: list[torch.Tensor | None]  # one entry per parameter
    used: frozenset[int]  # the indices of those that are not None


class ReductionInFlight(NamedTuple):
    """A reduction that was started."""

    reduction: Reduction
    layout: GradientLayout
    is_full: bool  # its result is published in .grad, not added to the partial


class GradientAccumulator:
    """The accumulators of one unit, and the moves between them.

    Args:
        storage: The parameters.
        rules: Layouts and dtypes of their gradients.
    """

    def __init__(self, storage: UnitParams, rules: GradientRules) -> None:
        self._storage = storage
        self.rules = rules
        self._unreduced: FlatGradients | None = None  # U
        self._partial: FlatGradients | None = None  # Q
        self.sharded = _grads_of(storage)  # A
        # Parameters whose gradient must be converted to the tensor to reduce, by ``own_part_of``.
        converted = (i for i, param in enumerate(storage.params) if param.needs_conversion)
        self._converted = tuple(converted)
        self.num_in_flight = 0
        self._dropped: frozenset[int] = frozenset()  # cleared while they were in flight
        self._cleared: frozenset[int] = frozenset()  # since something was last accumulated
        self._window = Window()

    def for_copy(self, storage: UnitParams) -> GradientAccumulator:
        """Return the accumulator of a copy of the unit. Only ``.grad`` is copied with it."""
        rules = GradientRules(storage, self.rules.reduce_dtype, self.rules.chosen_dtype)
        copied = GradientAccumulator(storage, rules)
        copied._window = dataclasses.replace(self._window)
        if isinstance(copied.sharded, ReplicatedGrads) and isinstance(
            self.sharded, ReplicatedGrads
        ):
            copied.sharded.are_views = self.sharded.are_views
        return copied

    @property
    def label(self) -> str:
        """The name of the unit."""
        return self._storage.label

    # --- pending gradients ------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """Whether gradients are accumulated that are not in ``.grad``."""
        return self._unreduced is not None or self._partial is not None

    @property
    def pending(self) -> str:
        """What is missing before accumulated gradients are in ``.grad``; empty if nothing is."""
        if self._unreduced is not None:
            return "not reduced yet (GradientSync.NONE)"
        if self._partial is not None:
            return "not reduced across the replicas yet (GradientSync.REDUCE_SCATTER)"
        return "still in flight (set_is_last_backward(False))" if self.num_in_flight else ""

    def pending_of_params(self) -> dict[int, DTensor | None]:
        """Return the partial of each parameter that has one; None for unreduced gradients."""
        mesh_info, found = self._storage.spec.mesh_info, dict[int, DTensor | None]()
        if self._partial is not None:
            for index, local in self._partial.shards(mesh_info.shard_rank):
                found[index] = self._storage.params[index].partial_of(local, mesh_info)
        if self._unreduced is not None:
            found.update(dict.fromkeys(self._unreduced.used))
        return found

    def clear(self, indices: frozenset[int] | None = None) -> None:
        """Drop pending gradients of all parameters, or of some."""
        gone = frozenset(range(len(self._storage.params))) if indices is None else indices
        for grads in (self._unreduced, self._partial):
            if grads is not None:
                grads.erase(gone)
        # Several optimizers may each clear a part. What counts must be the same on all ranks: the
        # cleared parameters, not those of them that this rank used.
        self._cleared |= gone
        if self._unreduced is not None:
            self._unreduced = self._unreduced.unless_all(self._cleared)
        if self._partial is not None:
            self._partial = self._partial.unless_all(self._cleared)
        if self.num_in_flight:
            self._dropped |= gone
        elif not self.is_pending:
            self.close_window()
        self.sharded.forget(gone)
        self._release_if_settled()

    def _release_if_settled(self) -> None:
        if not self.is_pending and not self.num_in_flight:
            release_pending(self)

    def settle(self) -> None:
        """Put into ``.grad`` everything that was published, also what is copied to the host."""
        self.sharded.settle()
        self._release_if_settled()

    @property
    def is_window_open(self) -> bool:
        """Whether a backward was not FULL, and none since was."""
        return self._window.is_open

    def close_window(self) -> None:
        """Begin a new window with the next gradients."""
        self._window.close()

    def _open_window(self) -> None:
        self._window.is_open = True
        self._cleared = frozenset()
        hold_pending(self)

    def clear_window(self) -> None:
        """Drop everything, ``.grad`` included."""
        self.clear()
        self.sharded.clear()

    def forget_in_flight(self) -> None:
        """Forget reductions in flight: they were abandoned."""
        self.num_in_flight = 0
        self._dropped = frozenset()
        self._release_if_settled()

    # --- arrived gradients ------------------------------------------------------------

    def drop_arrived(self) -> None:
        """Drop unsharded gradients that arrived and were not taken."""
        if self.sharded.has_arrivals:
            for param in self._storage.params:
                param.unsharded.grad = None

    def _take(self) -> _Arrived:
        params = self._storage.params
        if not self.sharded.has_arrivals:
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
                gradients[index] = params[index].own_part_of(gradient)
        used = self.rules.everything
        return _Arrived(gradients, used.difference(missing) if missing else used)

    # --- NONE -------------------------------------------------------------------------

    @unrecorded
    def accumulate(self, hooks: Sequence[TensorHook] = ()) -> None:
        """Add the arrived gradients to ``U``.

        Args:
            hooks: See the arrived gradients, one after the other.
        """
        arrived = self._take()
        layout = self.rules.layout_for(arrived.used, (self._unreduced, self._partial))
        if not layout.indices:
            return
        self._open_window()
        if self._unreduced is None:
            dtype = self.rules.accumulate_dtype
            is_idle = not (self.num_in_flight or self.is_pending)
            flat = self.sharded.free_bucket(layout, dtype) if is_idle else None
            flat = layout.allocate(dtype) if flat is None else flat
            layout.pack(flat, arrived.gradients)
            layout.run_hooks(hooks, flat, arrived.used)
            self._unreduced = FlatGradients(layout, flat, arrived.used)
        else:
            flat, used = self._add_to_unreduced(layout, arrived, hooks)
            self._unreduced = FlatGradients(layout, flat, used)

    def _add_to_unreduced(
        self, layout: GradientLayout, arrived: _Arrived, hooks: Sequence[TensorHook]
    ) -> tuple[torch.Tensor, frozenset[int]]:
        assert self._unreduced is not None
        flat = self._unreduced.laid_out(layout)
        if hooks:
            new = layout.allocate(flat.dtype)
            layout.pack(new, arrived.gradients)
            layout.run_hooks(hooks, new, arrived.used)
            flat.add_(new)
        else:
            layout.add(flat, arrived.gradients)
        return flat, arrived.used | self._unreduced.used

    # --- REDUCE_SCATTER and FULL ------------------------------------------------------

    @unrecorded
    def start_reduce(
        self, settings: ReduceSettings, *, over_replicas: bool, divide_factor: float | None
    ) -> ReductionInFlight | None:
        """Start reducing ``U`` and the arrived gradients.

        **Collective:** the shard group, then the replica group if ``over_replicas``.

        Raises:
            RuntimeError: The window was begun with another divide factor.
        """
        arrived = self._take()
        layout = self.rules.layout_for(arrived.used, (self._unreduced, self._partial))
        if not layout.indices:
            return None
        self._window.divide(divide_factor, self._storage.label)
        self._open_window()
        if over_replicas:
            self.close_window()
        mesh_info, hooks = self._storage.spec.mesh_info, settings.reduce_hooks
        chosen = next((hook.wire_dtype for hook in hooks if hook.wire_dtype), None)
        plan = ReducePlan(
            wire_dtype=chosen or self.rules.wire_dtype(layout),
            accumulate_dtype=self.rules.accumulate_dtype,
            shard_group=settings.scatter_group or mesh_info.shard_group,
            replicate_group=mesh_info.replicate_group if over_replicas else None,
            replicate_count=mesh_info.replicate_count,
            divide_factor=divide_factor,
            label=self._storage.label,
        )
        rows, used = self._pack(layout, plan, arrived, settings)
        partial = None if self._partial is None else self._partial.laid_out(layout)
        self._unreduced = self._partial = None
        reduction = Reduction(plan, rows, layout.marks_for(used), partial, self._storage.comm)
        self.num_in_flight += 1
        is_full = over_replicas or mesh_info.replicate_group is None
        return ReductionInFlight(reduction, layout, is_full)

    def _pack(
        self,
        layout: GradientLayout,
        plan: ReducePlan,
        arrived: _Arrived,
        settings: ReduceSettings,
    ) -> tuple[Rows, frozenset[int]]:
        """Return ``U`` and the arrived gradients in memory to send from, and which there are."""
        on_arrived = [hook.arrived for hook in settings.reduce_hooks if hook.arrived]
        before = [hook.before for hook in settings.reduce_hooks if hook.before]
        rows: Rows
        if self._unreduced is not None:
            rows, used = self._add_to_unreduced(layout, arrived, on_arrived)
        else:
            used = arrived.used
            if is_narrowed_late(arrived.gradients, plan.wire_dtype):
                rows = layout.allocate(plan.accumulate_dtype)
            else:
                rows = self._allocate(layout, plan, as_one=bool(on_arrived or before))
            layout.pack(rows, arrived.gradients)
            if on_arrived:
                assert isinstance(rows, torch.Tensor)
                layout.run_hooks(on_arrived, rows, used)
        if settings.zero_unused:
            used = frozenset(layout.indices)
        if before:
            assert isinstance(rows, torch.Tensor)
            layout.run_hooks(before, rows, used)
        return rows, used

    def _allocate(self, layout: GradientLayout, plan: ReducePlan, *, as_one: bool) -> Rows:
        """Return uninitialised memory to send from; in one tensor if hooks are to see it."""
        comm, wire, group = self._storage.comm, plan.wire_dtype, plan.shard_group
        if not self.num_in_flight and self._partial is None:
            bucket = self.sharded.free_bucket(layout, wire)
            if bucket is not None:
                return bucket
        rows = None if as_one else comm.allocate_rows(layout.shard_numel, wire, group=group)
        if rows is not None:
            return rows
        flat = comm.allocate(
            layout.numel, CommStream.SCATTER, dtype=wire, device=layout.device, group=group
        )
        return flat.view(layout.shard_count, -1)

    @unrecorded
    def finish_reduce(
        self, in_flight: ReductionInFlight, after: Sequence[TensorHook] = ()
    ) -> InFlight | None:
        """Publish the result of a reduction in ``.grad``, or add it to ``Q``.

        Args:
            in_flight: The reduction.
            after: Hooks on the shard that is about to be added to ``.grad``.

        Returns:
            The copy of the gradients to the host, if they live there. The caller waits for it.
        """
        self.num_in_flight -= 1
        if in_flight.is_full and self._storage.host_copies is None:  # else not in .grad yet
            self._release_if_settled()
        reduced = in_flight.reduction.finish()
        result = FlatGradients(in_flight.layout, reduced.shard, reduced.used)
        if self._dropped:
            dropped, self._dropped = self._dropped, frozenset()
            result.erase(dropped)
            kept = result.unless_all(dropped)
            if kept is None:
                if not self.is_pending:
                    self.close_window()
                self._release_if_settled()
                return None
            result = kept
        if not in_flight.is_full:
            # Also when no rank of this shard group had a gradient: another replica may have one.
            self._partial = result
            return None
        if after:  # also without a gradient: the hook may communicate
            in_flight.layout.run_hooks(after, result.flat, result.used)
        return self.sharded.publish(result) if result.used else None


def _grads_of(storage: UnitParams) -> ShardedGrads | HostGrads | ReplicatedGrads:
    host_copies, host = storage.host_copies, storage.spec.host
    if host_copies is not None and host is not None:
        return HostGrads(storage, host_copies, host)
    if isinstance(storage, ReplicatedParams):
        return ReplicatedGrads(storage)
    return ShardedGrads(storage)
