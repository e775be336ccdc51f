"""Optimizers in backward against the ordinary ones after it, bit for bit."""

from itertools import product

import pytest
import torch

from tests.support.covering import covering
from tests.support.optimizers import DTYPES, MANY, SCHEDULES, make, train_both


def compare(shape, name, dtype, schedule):
    cls, options = MANY[name]
    train_both(lambda: make(shape, DTYPES[dtype]), cls, options, schedule=schedule)


@pytest.mark.default_rows(4)
@covering("shape, name, dtype, schedule", product([(2,), (2, 2)], MANY, DTYPES, SCHEDULES))
def test_as_the_ordinary_one(run_ranks, shape, name, dtype, schedule):
    run_ranks(compare, torch.Size(shape).numel(), shape, name, dtype, schedule)
