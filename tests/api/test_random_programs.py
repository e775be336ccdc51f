"""Random programs of users beside one process, bit for bit: see ``tests.support.programs``."""

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.mutants import mutants
from tests.support.programs import Layout, Microbatch, Program, Window, play, programs
from tests.support.threads import ThreadRankError, run_threads

TIMEOUT = 200
few = settings(max_examples=4)
on_processes = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def run(program):
    run_threads(play, program.num_ranks, program, timeout=TIMEOUT)


@few
@given(programs())
def test_some_programs(program):
    run(program)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
def test_many_programs(number):
    @seed(number)
    @settings(max_examples=50)
    @given(programs())
    def run_each(program):
        run(program)

    run_each()


@pytest.mark.slow
@pytest.mark.timeout(0)  # thousands of programs with HYPOTHESIS_PROFILE=night
@on_processes
@given(program=programs())
def test_programs_on_processes(run_ranks, program):
    run_ranks(play, program.num_ranks, program, timeout=TIMEOUT)


def windows():
    """Return a program of two windows, the microbatches of which reduce to different degrees."""
    used = ((True, False), (False, True), (True, True), (False, False))
    microbatches = [
        Microbatch(1, "R", "N", used, True, "nothing"),
        Microbatch(2, "F", "F", used, False, "evaluation"),
        Microbatch(3, "F", "F", used, False, "nothing"),
    ]
    layout = Layout((2, 2), (True, False), (True, True), False, (None, True, None), False, None)
    windows = [Window([], microbatches), Window([], microbatches)]
    options = ("bfloat16, added in float32", False, "ordinary", 0.5, None, True)
    return Program(layout, (None, True), *options, windows=windows)


def test_a_program_of_two_windows():
    run(windows())


@pytest.mark.parametrize(
    "mutant",
    [
        mutants.partial_added_after_the_all_reduce,
        mutants.partial_not_cleared,
        mutants.whole_gradients_reduced_but_not_cleared,
        mutants.all_reduce_of_grad_and_new,
        mutants.partial_keyed_by_position,
    ],
)
def test_classic_mistakes_are_found(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(ThreadRankError):
        run(windows())
