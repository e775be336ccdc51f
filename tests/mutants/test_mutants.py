"""Classic mistakes, put in by patching: the suite must find each.

A mutant that falls over by itself, or whose numbers are wrong in another way than its case expects,
shows nothing about the suite.
"""

import pytest
import torch

from tests.mutants.cases import CASES
from tests.mutants.mutants import FOUND


@pytest.mark.parametrize("name", CASES)
def test_without_a_mutant_the_numbers_are_right(name):
    case = CASES[name]
    assert case.run() == [case.right] * torch.Size(case.mesh).numel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "name", "wrong"), FOUND, ids=[mutant.__name__ for mutant, _, _ in FOUND]
)
def test_a_mutant_is_found_by_its_numbers(mutant, name, wrong, monkeypatch):
    case = CASES[name]
    mutant(monkeypatch)
    num_ranks = torch.Size(case.mesh).numel()
    assert case.run() == (wrong if isinstance(wrong, list) else [wrong] * num_ranks)


def test_every_case_finds_a_mutant():
    assert {name for _, name, _ in FOUND} == set(CASES)
