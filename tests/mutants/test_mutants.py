"""Classic mistakes, put in by patching: the suite must find each.

A mutant that falls over by itself, or whose numbers are wrong in another way than its case expects,
shows nothing about the suite.
"""

import pytest
import torch
import torch.distributed as dist

from meshard._comm.gradient_buffer import GradientLayout
from tests.gradients.test_known_numbers import CASES as PUBLIC_CASES
from tests.gradients.test_known_numbers import Case, backward, sharded
from tests.mutants.mutants import FOUND
from tests.support.models import Table


def count_poison(mesh):
    """Return how many elements of the flat shard hold what was in memory before."""
    original = GradientLayout.allocate

    def allocate(self, dtype):
        return original(self, dtype).fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientLayout, "allocate", allocate)
        model = sharded(mesh, Table([(3,), (5, 2)]))
        dist.barrier()  # all ranks have patched
        for sync in "NF":
            backward(model, sync, torch.zeros(()), [torch.ones(3), torch.ones(5, 2)])
        dist.barrier()
    shown = next(iter(model.parameters())).grad.to_local()  # a view of the whole row
    row = shown.as_strided((shown.untyped_storage().nbytes() // shown.itemsize,), (1,), 0)
    return int(row.isnan().sum())


CASES = {**PUBLIC_CASES, "padding_is_zero": Case(count_poison, (4,), (), 0)}


def test_without_a_mutant_padding_is_zero():
    assert CASES["padding_is_zero"].run() == [0] * 4


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
