"""Classic mistakes in reductions of gradients, each as a patch.

A mutant is the mistake and nothing else: it must not fall over by itself, or on the way to where it
would do harm, so that what finds it are its numbers.
"""

import math
from fractions import Fraction

import torch

from meshard._comm import cpu
from meshard._comm.gradient_buffer import GradientLayout
from meshard._engine.lifecycle import Lifecycle
from meshard._gradients.accumulator import (
    GradientAccumulator,
    GradientRules,
    Gradients,
    ShardedGrads,
    Window,
)
from meshard._mesh.layout import matching_parts
from meshard.foreach_reduce import Divisors, ReducePlan, Reduction

ONE = Fraction(1)
FOUND = []  # the mutant, the case that finds it, and what the ranks then have


def found_by(case, wrong):
    """Say which case finds a mutant, and what every rank has then; a list: what each has."""

    def register(mutant):
        FOUND.append((mutant, case, wrong))
        return mutant

    return register


def instead(patch, owner, name):
    """Replace a method by the decorated function, which gets the original first."""
    original = getattr(owner, name)

    def install(replacement):
        patch.setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))

    return install


@found_by("ranks_average", [(0.5, 0.0), (0.5, 0.0), (2.5, 0.0), (2.5, 0.0)])
def partial_added_after_the_all_reduce(patch):
    @instead(patch, Reduction, "__init__")
    def start(init, self, plan, layout, rows, partial, comm):
        self.late = partial
        init(self, plan, layout, rows, None, comm)

    @instead(patch, Reduction, "finish")
    def add_late(finish, self):
        reduced = finish(self)
        return reduced if self.late is None else reduced + self.late


@found_by("partials_have_the_shard_groups_share", (1.5, 1.5))
def partial_divided_by_all_ranks(patch):
    @instead(patch, Reduction, "__init__")
    def start(init, self, plan, *rest):
        class DividedByAll(ReducePlan):
            @property
            def divisors(self):
                divisors = super().divisors
                after = divisors.after_scatter * self.replicate_count
                return divisors._replace(after_scatter=after)

        is_partial = plan.replicate_group is None and plan.replicate_count > 1
        init(self, DividedByAll(*plan) if is_partial else plan, *rest)


@found_by("a_group_of_one_divides_once", (0.25, 0.25))
def divided_twice_in_groups_of_one(patch):
    @instead(patch, Reduction, "__init__")
    def start(init, self, plan, layout, rows, *rest):
        if plan.shard_group.size() == 1:
            total = plan.divide_factor or plan.replicate_count
            rows[:, : layout.shard_numel].div_(total / plan.replicate_count)
        init(self, plan, layout, rows, *rest)


@found_by("partials_are_wide", (256.0, 4.0))
def partial_in_the_reduce_dtype(patch):
    @instead(patch, GradientAccumulator, "finish_reduce")
    def round_partial(finish, self):
        finish(self)
        if self._partial is not None:
            wire = self.rules.wire_dtype(self._partial.layout)
            flat = self._partial.flat.to(wire).to(self._partial.flat.dtype)
            self._partial = self._partial._replace(flat=flat)


def _layout_of(rules, indices):
    params = rules._unit_params
    layouts = [param.layout for param in params.params]
    return GradientLayout(layouts, tuple(indices), params.spec.device)


@found_by("another_parameter_on_full", (None, 27.5))
def partial_keyed_by_position(patch):
    """A buffer has room for what this reduction uses, and the partial is added as it stands."""

    def move(self, buffer, to, held):
        moved = buffer.new_zeros((*buffer.shape[:-1], to.row_numel))
        common = min(moved.shape[-1], buffer.shape[-1])
        moved.narrow(-1, 0, common).copy_(buffer.narrow(-1, 0, common))
        return moved

    patch.setattr(GradientLayout, "move", move)
    patch.setattr(GradientRules, "layout_for", lambda self, used, _: _layout_of(self, sorted(used)))


def _keep(patch, accumulator):
    @instead(patch, GradientAccumulator, "start_reduce")
    def keep(start, self, *args, **kwargs):
        held = getattr(self, accumulator)
        in_flight = start(self, *args, **kwargs)
        setattr(self, accumulator, held)
        return in_flight


@found_by("partials_have_the_shard_groups_share", (3.0, 3.0))
def partial_not_cleared(patch):
    _keep(patch, "_partial")


@found_by("whole_gradients_are_reduced_once", (4.0, 4.0))
def whole_gradients_reduced_but_not_cleared(patch):
    _keep(patch, "_unreduced")


@found_by("full_twice", (1.5, 1.5))
def factor_applied_again_to_grad(patch):
    @instead(patch, ShardedGrads, "publish")
    def divide_old(publish, self, new):
        for param in self._unit_params.params:
            if param.sharded.grad is not None:
                param.sharded.grad.div_(self._unit_params.spec.mesh_info.shard_count)
        publish(self, new)


@found_by("a_narrow_wire_is_divided", (4.0, 4.0))
def scaling_dropped_when_dtypes_differ(patch):
    @instead(patch, Reduction, "__init__")
    def start(init, self, plan, layout, rows, *rest):
        class Undivided(ReducePlan):
            divisors = Divisors(ONE, ONE, ONE, ONE)

        plan = Undivided(*plan) if rows.dtype != plan.accumulate_dtype else plan
        init(self, plan, layout, rows, *rest)


@found_by("one_factor_per_window", (5.0, 5.0))
def factor_changed_in_part_of_a_window(patch):
    """Neither the setter nor the reduction knows what the window was begun with."""
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(Window, "is_open", never)
    patch.setattr(Window, "divide", lambda self, factor, label: None)


@found_by("padding_is_zero", [0, 0, 2, 5])
def padding_not_zeroed(patch):
    """What is missing is the padding of slots that are used; unused ones are filled as they were.

    A slot that is used is first put back to what memory held.
    """

    @instead(patch, GradientLayout, "reduce_scatter_copy_in")
    def copy_without_padding(copy_in, self, rows, gradients, used):
        given, before = list(gradients), rows.clone()
        copy_in(self, rows, gradients, used)
        for slot in self.ranges.values():
            gradient, layout = given[slot.index], self.params[slot.index]
            if gradient is not None and not layout.is_regular:
                part = rows.narrow(1, slot.offset, slot.numel)
                part.copy_(before.narrow(1, slot.offset, slot.numel))
                for ours, theirs in matching_parts(part, gradient, layout):
                    ours.copy_(theirs)


@found_by("cleared_on_its_way", (102.5, 100.0))
def zero_grad_forgets_what_is_on_its_way(patch):
    @instead(patch, GradientAccumulator, "clear")
    def clear_what_has_arrived(clear, self, indices=None):
        dropped = self._cleared_in_flight
        clear(self, indices)
        self._cleared_in_flight = dropped


@found_by("a_unit_that_full_skips", ((None, None), (2.0, None)))
def no_flush_at_the_end_of_backward(patch):
    @instead(patch, Lifecycle, "finish_backward")
    def finish_without(finish, self, *run):
        self._flush = lambda unit, **_: None
        try:
            finish(self, *run)
        finally:
            del self._flush


@found_by("a_mode_for_each_unit", ((None, None), (None, None), (3.0, 3.0)))
def mode_of_the_root_for_every_unit(patch):
    @instead(patch, Lifecycle, "_ensure_backward")
    def begin_as_the_root(begin, self, *early):
        root, *others = self.units()
        for unit in others:
            unit.settings.sync = root.settings.sync
        return begin(self, *early)


@found_by("ranks_are_summed_wide", (256.0, 4.0))
def ranks_summed_in_the_wire_dtype(patch):
    def sum_narrow(output, rows):
        for row in rows[1:]:
            rows[0].add_(row)
        output.copy_(rows[0])

    patch.setattr(cpu, "sum_rows", sum_narrow)

    @instead(patch, cpu, "sum_two")
    def sum_two_narrow(sum_two, output, received, own):
        narrow = torch.empty_like(output, dtype=own.dtype)
        sum_two(narrow, received, own)
        output.copy_(narrow)


@found_by("float16_is_divided_before_it_is_narrowed", (math.inf, 1.0))
def narrowed_before_it_is_divided(patch):
    @instead(patch, Reduction, "__init__")
    def start(init, self, plan, layout, rows, *rest):
        init(self, plan, layout, rows.to(plan.wire_dtype), *rest)


@found_by("float64_stays", (1.0, 1.0))
def accumulate_dtype_always_float32(patch):
    patch.setattr(GradientRules, "accumulate_dtype", lambda *_: torch.float32)


@found_by("the_widest_on_the_wire", (1.0, 256.0))
def wire_dtype_of_the_first_parameter(patch):
    def first(self, layout):
        return self.reduce_dtype or self._unit_params.compute_dtypes[layout.indices[0]]

    patch.setattr(GradientRules, "wire_dtype", first)


@found_by("frozen_in_a_window", (2.0, None))
def frozen_in_a_window_is_lost(patch):
    def only_trainable(self, used, accumulated):
        params = enumerate(self._unit_params.params)
        return _layout_of(self, (i for i, param in params if param.sharded.requires_grad))

    patch.setattr(GradientRules, "layout_for", only_trainable)

    @instead(patch, GradientLayout, "move")
    def move_what_fits(move, self, buffer, to, held):
        return move(self, buffer, to, held & frozenset(to.indices))


@found_by("a_void_window", ((1.0, 1.0), (5.0, 5.0)))
def grad_of_a_void_window_kept(patch):
    def abandon(self, *, is_void):
        self._drop_arrived()
        self.arrived.clear()
        self.is_in_flight = False
        if is_void:
            self.clear(self.rules.everything)
        self._release_if_settled()

    patch.setattr(Gradients, "abandon", abandon)


@found_by("a_partial_that_underflows", (None, 0.5))
def counts_of_a_partial_are_lost(patch):
    @instead(patch, Reduction, "__init__")
    def start(init, self, plan, layout, rows, partial, comm):
        if partial is not None:
            partial[layout.shard_numel :].zero_()
        init(self, plan, layout, rows, partial, comm)
