"""Would the suite notice the classic mistakes? Each is put in by patching, and must be found."""

from fractions import Fraction

import pytest
import torch

from meshard._comm.foreach_reduce import Divisors, Reduction
from meshard._comm.gradient_buffer import GradientLayout
from meshard._runtime.gradient_state import GradientState
from meshard._runtime.sharded_grads import ShardedGrads
from tests.mutants import core
from tests.support.threads import ThreadRankError

ONE = Fraction(1)


def partial_added_after_the_all_reduce(patch):
    init, finish = Reduction.__init__, Reduction.finish

    def start(self, request, comm):
        self.late, request.partial = request.partial, None
        init(self, request, comm)

    def add_late(self):
        reduced = finish(self)
        return reduced if self.late is None else reduced._replace(shard=reduced.shard + self.late)

    patch.setattr(Reduction, "__init__", start)
    patch.setattr(Reduction, "finish", add_late)


def partial_divided_by_all_ranks(patch):
    init = Reduction.__init__

    def start(self, request, comm):
        init(self, request, comm)
        if request.replicate_group is None and request.replicate_count > 1:
            after = self._divisors.after_scatter * request.replicate_count
            self._divisors = self._divisors._replace(after_scatter=after)

    patch.setattr(Reduction, "__init__", start)


def divided_twice_in_groups_of_one(patch):
    init = Reduction.__init__

    def start(self, request, comm):
        if request.shard_group.size() == 1:
            total = request.divide_factor or request.replicate_count
            request.buffer.div_(total / request.replicate_count)
        init(self, request, comm)

    patch.setattr(Reduction, "__init__", start)


def partial_in_the_reduce_dtype(patch):
    finish = GradientState.finish_reduce

    def round_partial(self, in_flight, after=()):
        finish(self, in_flight, after)
        if self._partial is not None:
            wire = self._wire_dtype(in_flight.layout)
            flat = self._partial.flat.to(wire).to(self._partial.flat.dtype)
            self._partial = self._partial._replace(flat=flat)

    patch.setattr(GradientState, "finish_reduce", round_partial)


def partial_keyed_by_position(patch):
    def move(self, buffer, to, held):
        moved = buffer.new_full((*buffer.shape[:-1], to.shard_numel), -0.0)
        common = min(moved.shape[-1], buffer.shape[-1])
        moved.narrow(-1, 0, common).copy_(buffer.narrow(-1, 0, common))
        return moved

    def only_used(self, gradients):
        indices = tuple(i for i, gradient in enumerate(gradients) if gradient is not None)
        held = self._partial or self._unreduced
        indices = indices or (held.layout.indices if held is not None else ())
        layouts = [param.layout for param in self._group.params]
        return GradientLayout(layouts, indices, self._group.place.device)

    patch.setattr(GradientLayout, "move", move)
    patch.setattr(GradientState, "_layout_for", only_used)


def partial_not_cleared(patch):
    start = GradientState.start_reduce

    def keep(self, **kwargs):
        held = self._partial
        in_flight = start(self, **kwargs)
        self._partial = held
        return in_flight

    patch.setattr(GradientState, "start_reduce", keep)


def whole_gradients_reduced_but_not_cleared(patch):
    start = GradientState.start_reduce

    def keep(self, **kwargs):
        held = self._unreduced
        in_flight = start(self, **kwargs)
        self._unreduced = held
        return in_flight

    patch.setattr(GradientState, "start_reduce", keep)


def factor_applied_again_to_grad(patch):
    add = ShardedGrads.add

    def divide_old(self, new):
        if self._shown is not None:
            self._shown.flat.div_(self._group.place.roles.shard_count)
        add(self, new)

    patch.setattr(ShardedGrads, "add", divide_old)


def all_reduce_of_grad_and_new(patch):
    start = GradientState.start_reduce

    def reduce_grad_too(self, **kwargs):
        shown = self.sharded._shown
        if shown is not None and kwargs["over_replicas"]:
            self._partial = shown._replace(flat=shown.flat.clone())
        return start(self, **kwargs)

    patch.setattr(GradientState, "start_reduce", reduce_grad_too)


def scaling_dropped_when_dtypes_differ(patch):
    init = Reduction.__init__

    def start(self, request, comm):
        init(self, request, comm)
        if request.buffer.dtype != request.accumulate_dtype:
            self._divisors = Divisors(ONE, ONE, ONE, ONE)

    patch.setattr(Reduction, "__init__", start)


def factor_changed_in_part_of_a_window(patch):
    patch.setattr(GradientState, "is_pending", property(lambda self: False))


def padding_not_zeroed(patch):
    def pack(self, buffer, gradients):
        regular = [gradients[index] for index in self.regular]
        if self.regular and all(gradient is not None for gradient in regular):
            rows = [gradient.reshape(self.shard_count, -1) for gradient in regular]
            torch.cat(rows, dim=1, out=buffer.narrow(1, 0, self.regular_numel))
        self._write(buffer, gradients, self.irregular)

    patch.setattr(GradientLayout, "pack", pack)


MUTANTS = [
    partial_added_after_the_all_reduce,
    partial_divided_by_all_ranks,
    divided_twice_in_groups_of_one,
    partial_in_the_reduce_dtype,
    partial_keyed_by_position,
    partial_not_cleared,
    whole_gradients_reduced_but_not_cleared,
    factor_applied_again_to_grad,
    all_reduce_of_grad_and_new,
    scaling_dropped_when_dtypes_differ,
    factor_changed_in_part_of_a_window,
    padding_not_zeroed,
]


def run_until_one_fails():
    for check in core.CHECKS:
        try:
            check()
        except (AssertionError, ThreadRankError) as error:
            return check.__name__, error
    return None, None


@pytest.mark.slow
@pytest.mark.parametrize("check", core.CHECKS)
def test_the_core_passes_without_a_mutant(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_core_finds(mutant, monkeypatch):
    mutant(monkeypatch)
    found_by, error = run_until_one_fails()
    assert found_by is not None, f"nobody noticed: {mutant.__name__}"
    # Found by its numbers, not by an accident of the patch.
    cause = error.__cause__ if isinstance(error, ThreadRankError) else error
    assert isinstance(cause, AssertionError), f"{found_by}: {cause!r}"
