"""Classic mistakes in reductions of gradients, each as a patch.

A mutant is the mistake and nothing else: it must not fall over by itself, or on the way to where it
would do harm, so that what finds it are its numbers.
"""

from fractions import Fraction
from typing import Any

import pytest
import torch

from meshard._comm import cpu
from meshard._comm.gradient_buffer import GradientLayout
from meshard._engine.lifecycle import Lifecycle
from meshard._gradients.accumulator import GradientAccumulator, GradientRules, Window
from meshard._gradients.published import ShardedGrads
from meshard._mesh.layout import matching_parts
from meshard.foreach_reduce import Divisors, Reduced, Reduction

ONE = Fraction(1)
Patch = pytest.MonkeyPatch


def partial_added_after_the_all_reduce(patch: Patch) -> None:
    init, finish = Reduction.__init__, Reduction.finish

    def start(self: Any, plan: Any, buffer: Any, marks: Any, partial: Any, *rest: Any) -> None:
        self.late = partial
        init(self, plan, buffer, marks, None, *rest)

    def add_late(self: Any) -> Reduced:
        reduced = finish(self)
        return reduced if self.late is None else reduced._replace(shard=reduced.shard + self.late)

    patch.setattr(Reduction, "__init__", start)
    patch.setattr(Reduction, "finish", add_late)


def partial_divided_by_all_ranks(patch: Patch) -> None:
    init = Reduction.__init__

    def start(self: Any, plan: Any, *rest: Any) -> None:
        init(self, plan, *rest)
        if plan.replicate_group is None and plan.replicate_count > 1:
            after = self._divisors.after_scatter * plan.replicate_count
            self._divisors = self._divisors._replace(after_scatter=after)

    patch.setattr(Reduction, "__init__", start)


def divided_twice_in_groups_of_one(patch: Patch) -> None:
    init = Reduction.__init__

    def start(self: Any, plan: Any, buffer: Any, *rest: Any) -> None:
        if plan.shard_group.size() == 1:
            total = plan.divide_factor or plan.replicate_count
            for block in buffer:
                block.div_(total / plan.replicate_count)
        init(self, plan, buffer, *rest)

    patch.setattr(Reduction, "__init__", start)


def partial_in_the_reduce_dtype(patch: Patch) -> None:
    finish = GradientAccumulator.finish_reduce

    def round_partial(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        if self._partial is not None:
            wire = self.rules.wire_dtype(args[0].layout)
            flat = self._partial.flat.to(wire).to(self._partial.flat.dtype)
            self._partial = self._partial._replace(flat=flat)

    patch.setattr(GradientAccumulator, "finish_reduce", round_partial)


def partial_keyed_by_position(patch: Patch) -> None:
    """A buffer has room for what this reduction uses, and the partial is added as it stands."""

    def move(self: Any, buffer: torch.Tensor, to: Any, held: frozenset[int]) -> torch.Tensor:
        moved = buffer.new_full((*buffer.shape[:-1], to.shard_numel), -0.0)
        common = min(moved.shape[-1], buffer.shape[-1])
        moved.narrow(-1, 0, common).copy_(buffer.narrow(-1, 0, common))
        return moved

    def only_used(self: Any, used: frozenset[int], _: Any) -> GradientLayout:
        return GradientLayout(
            [param.layout for param in self._unit_params.params],
            tuple(sorted(used)),
            self._unit_params.spec.device,
        )

    patch.setattr(GradientLayout, "move", move)
    patch.setattr(GradientRules, "layout_for", only_used)


def _keep(patch: Patch, accumulator: str) -> None:
    start = GradientAccumulator.start_reduce

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = getattr(self, accumulator)
        in_flight = start(self, *args, **kwargs)
        setattr(self, accumulator, held)
        return in_flight

    patch.setattr(GradientAccumulator, "start_reduce", keep)


def partial_not_cleared(patch: Patch) -> None:
    _keep(patch, "_partial")


def whole_gradients_reduced_but_not_cleared(patch: Patch) -> None:
    _keep(patch, "_unreduced")


def factor_applied_again_to_grad(patch: Patch) -> None:
    add = ShardedGrads.publish

    def divide_old(self: Any, new: Any) -> None:
        if self._published is not None:
            self._published.flat.div_(self._unit_params.spec.mesh_info.shard_count)
        add(self, new)

    patch.setattr(ShardedGrads, "publish", divide_old)


def all_reduce_of_grad_and_new(patch: Patch) -> None:
    start = GradientAccumulator.start_reduce

    def reduce_grad_too(self: Any, *args: Any, over_replicas: bool, **kwargs: Any) -> Any:
        shown = self.sharded._published
        if shown is not None and over_replicas:
            self._partial = shown._replace(flat=shown.flat.clone())
        return start(self, *args, over_replicas=over_replicas, **kwargs)

    patch.setattr(GradientAccumulator, "start_reduce", reduce_grad_too)


def scaling_dropped_when_dtypes_differ(patch: Patch) -> None:
    init = Reduction.__init__

    def start(self: Any, plan: Any, rows: Any, *rest: Any) -> None:
        init(self, plan, rows, *rest)
        if rows[0].dtype != plan.accumulate_dtype:
            self._divisors = Divisors(ONE, ONE, ONE, ONE)

    patch.setattr(Reduction, "__init__", start)


def factor_changed_in_part_of_a_window(patch: Patch) -> None:
    """Neither the setter nor the reduction knows what the window was begun with."""
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(Window, "is_open", never)
    patch.setattr(Window, "divide", lambda self, factor, label: None)


def padding_not_zeroed(patch: Patch) -> None:
    """What is missing is the padding of slots that are used; unused ones are filled as they were.

    A slot that is used is first put back to what memory held.
    """
    copy_in = GradientLayout.reduce_scatter_copy_in

    def copy_without_padding(self: Any, rows: Any, gradients: Any, **how: Any) -> None:
        given, before = list(gradients), torch.cat(rows)
        copy_in(self, rows, gradients, **how)
        whole = torch.cat(rows)
        for slot in self.irregular:
            gradient = given[slot.index]
            if gradient is not None:
                part = whole.narrow(1, slot.offset, slot.numel)
                part.copy_(before.narrow(1, slot.offset, slot.numel))
                for ours, theirs in matching_parts(part, gradient, self.params[slot.index]):
                    ours.copy_(theirs)
        for block, filled in zip(rows, whole.chunk(len(rows)), strict=True):
            block.copy_(filled)

    patch.setattr(GradientLayout, "reduce_scatter_copy_in", copy_without_padding)


def zero_grad_forgets_what_is_on_its_way(patch: Patch) -> None:
    clear = GradientAccumulator.clear

    def clear_what_has_arrived(self: Any, indices: frozenset[int] | None = None) -> None:
        dropped = self._dropped
        clear(self, indices)
        self._dropped = dropped

    patch.setattr(GradientAccumulator, "clear", clear_what_has_arrived)


def no_flush_at_the_end_of_backward(patch: Patch) -> None:
    finish = Lifecycle.finish_backward

    def finish_without(self: Any, *run: Any) -> None:
        self._flush = lambda unit, **_: None
        try:
            finish(self, *run)
        finally:
            del self._flush

    patch.setattr(Lifecycle, "finish_backward", finish_without)


def mode_of_the_root_for_every_unit(patch: Patch) -> None:
    begin = Lifecycle._ensure_backward

    def begin_as_the_root(self: Any, *early: Any) -> Any:
        root, *others = self.units()
        for unit in others:
            unit.settings.sync = root.settings.sync
        return begin(self, *early)

    patch.setattr(Lifecycle, "_ensure_backward", begin_as_the_root)


def ranks_summed_in_the_wire_dtype(patch: Patch) -> None:
    sum_two = cpu.sum_two

    def sum_narrow(output: torch.Tensor, rows: torch.Tensor, *, keep_signs: bool) -> None:
        for row in rows[1:]:
            rows[0].add_(row)
        output.copy_(rows[0])

    def sum_two_narrow(output: torch.Tensor, received: torch.Tensor, own: torch.Tensor) -> None:
        narrow = torch.empty_like(output, dtype=own.dtype)
        sum_two(narrow, received, own)
        output.copy_(narrow)

    patch.setattr(cpu, "sum_rows", sum_narrow)
    patch.setattr(cpu, "sum_two", sum_two_narrow)


def narrowed_before_it_is_divided(patch: Patch) -> None:
    init = Reduction.__init__

    def start(self: Any, plan: Any, rows: Any, *rest: Any) -> None:
        init(self, plan, [block.to(plan.wire_dtype) for block in rows], *rest)

    patch.setattr(Reduction, "__init__", start)


def accumulate_dtype_always_float32(patch: Patch) -> None:
    patch.setattr(GradientRules, "accumulate_dtype", torch.float32)


def wire_dtype_of_the_first_parameter(patch: Patch) -> None:
    def first(self: Any, layout: GradientLayout) -> torch.dtype:
        return self.reduce_dtype or self._unit_params.compute_dtypes[layout.indices[0]]

    patch.setattr(GradientRules, "wire_dtype", first)


def frozen_in_a_window_is_lost(patch: Patch) -> None:
    def only_trainable(self: Any, used: Any, accumulated: Any) -> GradientLayout:
        params = self._unit_params.params
        indices = tuple(i for i, param in enumerate(params) if param.sharded.requires_grad)
        return GradientLayout(
            [param.layout for param in params], indices, self._unit_params.spec.device
        )

    move = GradientLayout.move

    def move_what_fits(self: Any, buffer: Any, to: Any, held: frozenset[int]) -> torch.Tensor:
        return move(self, buffer, to, held & frozenset(to.indices))

    patch.setattr(GradientRules, "layout_for", only_trainable)
    patch.setattr(GradientLayout, "move", move_what_fits)


def grad_of_a_void_window_kept(patch: Patch) -> None:
    patch.setattr(ShardedGrads, "clear", lambda self: None)


class _Unmarking:
    """Marks that are read, and not restored after a division."""

    def __init__(self, marks: Any) -> None:
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._marks, name)

    def write(self, flat: torch.Tensor, unused: torch.Tensor | None) -> None:
        pass


def mark_of_a_partial_not_restored(patch: Patch) -> None:
    after = Reduction._after_scatter

    def without_writing(self: Any) -> None:
        marks = self._marks
        if self._plan.replicate_group is None:  # its end is a partial
            self._marks = _Unmarking(marks)
        after(self)
        self._marks = marks

    patch.setattr(Reduction, "_after_scatter", without_writing)
