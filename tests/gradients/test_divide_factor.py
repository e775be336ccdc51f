"""Divide factors that are read when gradients are reduced."""

import pytest
import torch

from tests.support.ones import make, run, values
from tests.support.ranks import on_ranks, on_threads


@on_ranks(4)  # what Python does to warnings is shared by threads
def test_the_deprecated_name_of_fsdp2_does_the_same_and_warns():
    model = make()
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(2.0)
    run(model, "F", 4.0)
    assert values(model)["a"] == 8.0


@on_threads(4)
@pytest.mark.parametrize("kind", ["tensor", "callable"])
def test_a_divide_factor_may_be_read_at_each_reduction(kind):
    model = make()
    tokens = torch.tensor(0.0)
    model.set_gradient_divide_factor(tokens if kind == "tensor" else lambda: tokens.item())
    for count in (8.0, 2.0):
        tokens.fill_(count)
        model.zero_grad()
        run(model, "F", 4.0)
        assert values(model)["a"] == 16.0 / count
    tokens.fill_(0.0)
    with pytest.raises(ValueError, match=r"positive and finite, got 0\.0"):
        run(model, "F", 4.0)
