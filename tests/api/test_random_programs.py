"""Random programs of users beside one process, bit for bit: see ``tests.support.programs``."""

import re

import pytest
from hypothesis import Phase, example, given, seed, settings

from tests.mutants import mutants
from tests.support.insides import large_from
from tests.support.programs import Layout, Microbatch, Program, failure, programs, run, shorten
from tests.support.spread import slow

shortened_by_run = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])


def window():
    """Return a program whose microbatches reduce to different degrees."""
    skips = (2, 1, 0, 3)
    microbatches = (
        Microbatch("R", "N", skips=skips, twice=True, is_last=False),
        Microbatch("F", skips=skips, between="evaluation"),
        Microbatch("F", skips=skips),
    )
    return Program(
        (*microbatches, ("step",), ("zero", "none")) * 2,
        layout=Layout((2, 2), (("blocks.0.inner", None), ("blocks.0", None), ("blocks.1", True))),
        checkpoints=(None, True),
        policy="bfloat16, added in float32",
        momentum=0.5,
    )


TWO_BLOCKS = Layout((2, 2), (("blocks.0", None), ("blocks.1", True)))


@shortened_by_run
@given(programs())
@example(Program((("factor", 8.0), Microbatch("R"), Microbatch("F")), layout=TWO_BLOCKS))
@example(window())
def test_programs(program):
    run(program)


@pytest.mark.slow
@pytest.mark.timeout(0)  # thousands of programs with HYPOTHESIS_PROFILE=night
@pytest.mark.parametrize("number", range(2))
def test_many_programs(number):
    @seed(number)
    @shortened_by_run
    @given(programs())
    def run_each(program):
        run(program)

    run_each()


@pytest.mark.slow
@pytest.mark.timeout(0)
@shortened_by_run
@given(program=programs())
def test_programs_on_processes(program):
    run(program, on_processes=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
@shortened_by_run
@given(program=programs(replicates=True))
def test_programs_where_gradients_are_packed_as_they_arrive(program):
    """What a failure shows to play it again needs ``large_from(1)`` around it."""
    with large_from(1):
        run(program)


@pytest.mark.parametrize(
    "mutant",
    [
        slow(mutants.partial_keyed_by_position),
        # Of these most programs fail, so to shorten one takes ten times as long.
        slow(mutants.partial_added_after_the_all_reduce),
        slow(mutants.partial_not_cleared),
        slow(mutants.whole_gradients_reduced_but_not_cleared),
    ],
)
def test_a_failure_is_short_and_names_the_unit_the_parameter_and_the_rank(monkeypatch, mutant):
    mutant(monkeypatch)
    program, error = shorten(window(), failure(window()))
    assert re.search(r"operation \d, .* of .* \(unit .*\) on rank", str(error))
    assert len(program.operations) <= 2
    assert len(repr(program)) < 300
