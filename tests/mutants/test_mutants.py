"""Classic mistakes, put in by patching: the suite must find each.

For each mutant: the case that must find it, and the numbers that the ranks must then have. A mutant
that falls over by itself, or whose numbers are wrong in another way, shows nothing about the suite.
"""

import inspect
import math

import pytest

from tests.mutants import core, mutants

# The mutant, the case that finds it, and what the ranks have: a list of one for each, or the same.
FOUND = [
    (
        mutants.partial_added_after_the_all_reduce,
        "ranks_average",
        [(0.5, 0.0), (0.5, 0.0), (2.5, 0.0), (2.5, 0.0)],
    ),
    (
        mutants.partial_divided_by_all_ranks,
        "partials_have_the_shard_groups_share",
        (1.5, 1.5),
    ),
    (mutants.divided_twice_in_groups_of_one, "a_group_of_one_divides_once", (0.25, 0.25)),
    (mutants.partial_in_the_reduce_dtype, "partials_are_wide", (256.0, 4.0)),
    (mutants.partial_keyed_by_position, "another_parameter_on_full", (None, 27.5)),
    (mutants.partial_not_cleared, "partials_have_the_shard_groups_share", (3.0, 3.0)),
    (
        mutants.whole_gradients_reduced_but_not_cleared,
        "whole_gradients_are_reduced_once",
        (4.0, 4.0),
    ),
    (mutants.factor_applied_again_to_grad, "full_twice", (1.5, 1.5)),
    (mutants.all_reduce_of_grad_and_new, "full_twice", (3.0, 3.0)),
    (mutants.scaling_dropped_when_dtypes_differ, "a_narrow_wire_is_divided", (4.0, 4.0)),
    (mutants.factor_changed_in_part_of_a_window, "one_factor_per_window", (5.0, 5.0)),
    (mutants.padding_not_zeroed, "padding_is_zero", [0, 0, 2, 5]),
    (mutants.zero_grad_forgets_what_is_on_its_way, "cleared_on_its_way", (102.5, 100.0)),
    (
        mutants.no_flush_at_the_end_of_backward,
        "a_unit_that_full_skips",
        ((None, None), (2.0, None)),
    ),
    (
        mutants.mode_of_the_root_for_every_unit,
        "a_mode_for_each_unit",
        ((None, None), (None, None), (3.0, 3.0)),
    ),
    (mutants.ranks_summed_in_the_wire_dtype, "ranks_are_summed_wide", (256.0, 4.0)),
    (
        mutants.narrowed_before_it_is_divided,
        "float16_is_divided_before_it_is_narrowed",
        (math.inf, 1.0),
    ),
    (mutants.accumulate_dtype_always_float32, "float64_stays", (1.0, 1.0)),
    (mutants.wire_dtype_of_the_first_parameter, "the_widest_on_the_wire", (1.0, 256.0)),
    (mutants.frozen_in_a_window_is_lost, "frozen_in_a_window", (2.0, None)),
    (mutants.grad_of_a_void_window_kept, "a_void_window", ((1.0, 1.0), (5.0, 5.0))),
    (mutants.mark_of_a_partial_not_restored, "a_partial_that_underflows", (None, 0.5)),
]


@pytest.mark.parametrize("case", core.CASES, ids=lambda case: case.name)
def test_without_a_mutant_the_numbers_are_right(case):
    assert case.run() == [case.right] * case.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "name", "wrong"), FOUND, ids=[mutant.__name__ for mutant, _, _ in FOUND]
)
def test_a_mutant_is_found_by_its_numbers(mutant, name, wrong, monkeypatch):
    case = core.BY_NAME[name]
    mutant(monkeypatch)
    assert case.run() == (wrong if isinstance(wrong, list) else [wrong] * case.num_ranks)


def test_no_mutant_and_no_case_is_left_out():
    public = {
        mutant
        for name, mutant in inspect.getmembers(mutants, inspect.isfunction)
        if mutant.__module__ == mutants.__name__ and not name.startswith("_")
    }
    assert {mutant for mutant, _, _ in FOUND} == public
    assert {name for _, name, _ in FOUND} == set(core.BY_NAME)
