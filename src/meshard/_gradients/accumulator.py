"""Accumulation of gradients across microbatches.

Three accumulators per unit, all in the accumulate dtype: ``U`` holds whole gradients that no
collective has seen, ``Q`` what has been reduced over the shard group but not across the replicas,
``A`` is the ``.grad`` of the sharded parameters. With ``g`` the gradients of one backward:

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

from meshard._comm.communicator import InFlight, Rows
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._engine.param_group import ParamGroup
from meshard._gradients.host_grads import HostGrads
from meshard._gradients.reduce_plan import (
    GradientPlan,
    ReduceOptions,
    TensorHook,
    WireMemory,
    memory_for,
)
from meshard._gradients.replicated_grads import ReplicatedGrads
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._params.replicated_params import ReplicatedParams
from meshard.foreach_reduce import ReduceRequest, Reduction


@dataclass(slots=True)
class Window:
    """The microbatches whose gradients are added up before a step, for one unit.

    Attributes:
        is_open: A backward was not FULL, and none since was.
    """

    is_open: bool = False
    _has_divided: bool = False
    _factor: float | None = None

    def divide(self, factor: float | None, label: str) -> None:
        """Note that gradients are divided by ``factor``; None: the number of ranks.

        Args:
            factor: See ``resolve_divisors``.
            label: Name of the unit.

        Raises:
            RuntimeError: The window was begun with another one.
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
        """What comes next belongs to another window."""
        self.is_open = self._has_divided = False

    def copy(self) -> Window:
        """Return the same, for the copy of a unit."""
        return dataclasses.replace(self)


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


class _Arrived(NamedTuple):
    """The whole gradients of one backward."""

    gradients: list[torch.Tensor | None]  # one entry per parameter
    used: frozenset[int]  # those that have one


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
        accumulate_dtype: dtype of the accumulators; None: the wider of float32 and the parameters'.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self._group = group
        self.plan = GradientPlan(group, reduce_dtype, accumulate_dtype)
        self._unreduced: FlatGradients | None = None  # U
        self._partial: FlatGradients | None = None  # Q
        given = (i for i, param in enumerate(group.params) if param.is_given_otherwise)
        self._given_otherwise = tuple(given)  # whole gradients that are not yet what is reduced
        self.num_in_flight = 0
        self._dropped: frozenset[int] = frozenset()  # cleared while they were on their way
        self._cleared: frozenset[int] = frozenset()  # since something was last accumulated
        self._window = Window()
        host_copies, host = group.tensors.host_copies, group.spec.host
        self.sharded: ShardedGrads | HostGrads = ShardedGrads(group)  # A
        if host_copies is not None and host is not None:
            self.sharded = HostGrads(group, host_copies, host)
        elif isinstance(group.tensors, ReplicatedParams):
            self.sharded = ReplicatedGrads(group)

    def for_copy(self, group: ParamGroup) -> GradientState:
        """Return the state of a copy of the group, with nothing accumulated beside ``.grad``."""
        copied = GradientState(
            group, reduce_dtype=self.plan.reduce_dtype, accumulate_dtype=self.plan.chosen_dtype
        )
        copied._window = self._window.copy()
        copied.sharded.be_like(self.sharded)
        return copied

    @property
    def is_pending(self) -> bool:
        """Whether anything is accumulated that is not in ``.grad`` yet."""
        return self._unreduced is not None or self._partial is not None

    @property
    def pending(self) -> str:
        """What has not been done yet to what is accumulated, in words; empty if nothing is."""
        if self._unreduced is not None:
            return "not reduced yet (GradientSync.NONE)"
        if self._partial is not None:
            return "not reduced across the replicas yet (GradientSync.REDUCE_SCATTER)"
        return "still on their way (set_is_last_backward(False))" if self.num_in_flight else ""

    def pending_of_params(self) -> dict[int, DTensor | None]:
        """Return the partial of each parameter that has one; None if it is not reduced at all."""
        mesh_info, found = self._group.spec.mesh_info, dict[int, DTensor | None]()
        if self._partial is not None:
            for index, local in self._partial.shards(mesh_info.shard_rank):
                found[index] = self._group.params[index].partial_of(local, mesh_info)
        if self._unreduced is not None:
            found.update(dict.fromkeys(self._unreduced.used))
        return found

    def clear(self, indices: frozenset[int] | None = None) -> None:
        """Forget what is accumulated but not in ``.grad``, of all or of some parameters."""
        gone = frozenset(range(len(self._group.params))) if indices is None else indices
        for flat_grads in (self._unreduced, self._partial):
            if flat_grads is not None:
                flat_grads.erase(gone)
        # Several optimizers may each clear a part. What counts is the same on all ranks: which
        # parameters were cleared, not which of them this rank had used.
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

    def settle(self) -> None:
        """Have in ``.grad`` what has been reduced, also where it travels to the host for that."""
        self.sharded.settle()

    @property
    def is_window_open(self) -> bool:
        """Whether a backward was not FULL, and none since was."""
        return self._window.is_open

    def close_window(self) -> None:
        """What comes next belongs to another window."""
        self._window.close()

    def clear_window(self) -> None:
        """Forget everything, ``.grad`` included."""
        self.clear()
        self.sharded.clear()

    def forget_in_flight(self) -> None:
        """Reductions on their way were dropped."""
        self.num_in_flight = 0
        self._dropped = frozenset()

    def drop_arrived(self) -> None:
        """Forget whole gradients that have arrived but were not taken."""
        if isinstance(self.sharded, ReplicatedGrads) and not self.sharded.is_hidden:
            return  # what is there is what has been reduced
        for param in self._group.params:
            param.unsharded.grad = None

    def _take(self) -> _Arrived:
        if isinstance(self.sharded, ReplicatedGrads) and not self.sharded.is_hidden:
            return _Arrived([None] * len(self._group.params), frozenset())  # see drop_arrived
        gradients: list[torch.Tensor | None] = []
        missing = []
        for index, param in enumerate(self._group.params):
            gradient = param.unsharded.grad
            if gradient is None:
                missing.append(index)
            else:
                param.unsharded.grad = None
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
            gradients.append(gradient)
        for index in self._given_otherwise:
            gradient = gradients[index]
            if gradient is not None:
                gradients[index] = self._group.params[index].own_part_of(gradient)
        used = self.plan.everything
        return _Arrived(gradients, used.difference(missing) if missing else used)

    @unrecorded
    def accumulate(self, arrived: Sequence[TensorHook] = ()) -> None:
        """``NONE``: add the whole gradients that have arrived to ``U``."""
        gradients, used = new = self._take()
        layout = self.plan.layout_for(used, (self._unreduced, self._partial))
        if not layout.indices:
            return
        self._open_window()
        if self._unreduced is None:
            flat = self._bucket(layout, self.plan.accumulate_dtype)
            layout.pack(flat, gradients)
            layout.run_hooks(arrived, flat, used)
        else:
            flat, used = self._add_to_unreduced(layout, new, arrived)
        self._unreduced = FlatGradients(layout, flat, used)

    def _bucket(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for whole gradients: that of every step, if it is kept and free."""
        bucket = None
        if isinstance(self.sharded, ReplicatedGrads) and not (
            self.num_in_flight or self.is_pending
        ):
            bucket = self.sharded.free_bucket(layout, dtype)
        return layout.allocate(dtype) if bucket is None else bucket

    def _open_window(self) -> None:
        self._window.is_open = True
        self._cleared = frozenset()

    def _add_to_unreduced(
        self, layout: GradientLayout, came: _Arrived, arrived: Sequence[TensorHook]
    ) -> tuple[torch.Tensor, frozenset[int]]:
        assert self._unreduced is not None
        gradients, used = came
        flat = self._unreduced.laid_out(layout)
        if arrived:
            new = layout.allocate(flat.dtype)
            layout.pack(new, gradients)
            layout.run_hooks(arrived, new, used)
            flat.add_(new)
        else:
            layout.add(flat, gradients)
        return flat, used | self._unreduced.used

    @unrecorded
    def start_reduce(self, options: ReduceOptions) -> ReductionInFlight | None:
        """``REDUCE_SCATTER`` and ``FULL``: start reducing ``U`` and what has arrived.

        **Collective:** the shard group, then the replica group if ``over_replicas``.

        Raises:
            RuntimeError: The window was begun with another divide factor.
        """
        came = self._take()
        layout = self.plan.layout_for(came.used, (self._unreduced, self._partial))
        if not layout.indices:
            return None
        self._check_factor(options)
        mesh_info, accumulate_dtype = self._group.spec.mesh_info, self.plan.accumulate_dtype
        wire_dtype = options.wire_dtype or self.plan.wire_dtype(layout)
        memory = memory_for(
            layout,
            wire_dtype,
            accumulate_dtype,
            group=self._group,
            grads=self.sharded,
            options=options,
            is_idle=not self.num_in_flight,
            is_pending=self.is_pending,
            is_laid_out=self._unreduced is not None,
        )
        buffer, used = self._unsharded_buffer(layout, came, wire_dtype, options, memory)
        if options.zero_unused:
            used = frozenset(layout.indices)
        if options.before:
            assert isinstance(buffer, torch.Tensor)
            layout.run_hooks(options.before, buffer, used)
        partial = None if self._partial is None else self._partial.laid_out(layout)
        self._unreduced = self._partial = None
        request = ReduceRequest(
            buffer=buffer,
            wire_dtype=wire_dtype,
            output=memory.output,
            sums_apart=memory.sums_apart,
            reusable=memory.reusable,
            partial=partial,
            shard_group=options.shard_group or mesh_info.shard_group,
            replicate_group=mesh_info.replicate_group if options.over_replicas else None,
            replicate_count=mesh_info.replicate_count,
            divide_factor=options.divide_factor,
            accumulate_dtype=accumulate_dtype,
            marks=layout.marks_for(used),
            label=self._group.label,
        )
        reduction = Reduction(request, self._group.comm)
        self.num_in_flight += 1
        is_full = options.over_replicas or mesh_info.replicate_group is None
        return ReductionInFlight(reduction, layout, is_full)

    def _check_factor(self, options: ReduceOptions) -> None:
        self._window.divide(options.divide_factor, self._group.label)
        self._open_window()
        if options.over_replicas:
            self.close_window()

    def _unsharded_buffer(
        self,
        layout: GradientLayout,
        came: _Arrived,
        wire_dtype: torch.dtype,
        options: ReduceOptions,
        memory: WireMemory,
    ) -> tuple[Rows, frozenset[int]]:
        if memory.buffer is None:
            return self._add_to_unreduced(layout, came, options.arrived)
        gradients, used = came
        buffer = memory.buffer
        # float16 is divided before it is narrowed to, or sums would overflow that need not.
        if wire_dtype == torch.float16 and any(
            gradient is not None and gradient.dtype != wire_dtype for gradient in gradients
        ):
            buffer = layout.allocate(self.plan.accumulate_dtype)
        layout.pack(buffer, gradients)
        if options.arrived:
            assert isinstance(buffer, torch.Tensor)
            layout.run_hooks(options.arrived, buffer, used)
        return buffer, used

    @unrecorded
    def finish_reduce(
        self,
        in_flight: ReductionInFlight,
        after: Sequence[TensorHook] = (),
        *,
        is_offered: bool = False,
    ) -> InFlight | None:
        """Put the result of a reduction where it belongs: into ``.grad``, or into ``Q``.

        If ``is_offered``, somebody may want what goes into ``.grad``: see ``ShardedGrads.offer``.

        Returns:
            Its copy to the host, if that is where it goes; it must be waited for.
        """
        self.num_in_flight -= 1
        reduced = in_flight.reduction.finish()
        result = FlatGradients(in_flight.layout, reduced.shard, reduced.used)
        if self._dropped:
            dropped, self._dropped = self._dropped, frozenset()
            result.erase(dropped)
            kept = result.unless_all(dropped)
            if kept is None:
                if not self.is_pending:
                    self.close_window()
                self.sharded.not_shown()
                return None
            result = kept
        if not in_flight.is_full:
            # Also when nobody in this shard group had a gradient: another replica may have had.
            self._partial = result
            return None
        if after:  # also without a gradient: the hook may communicate
            in_flight.layout.run_hooks(after, result.flat, result.used)
        if not result.used:
            self.sharded.not_shown()
        elif not (is_offered and self.sharded.offer(result)):
            return self.sharded.add(result)
        return None
