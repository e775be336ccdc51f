"""Divide factors that are read when gradients are reduced."""

import pytest
import torch
import torch.distributed as dist

from tests.support.insides import large_from
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
    for extreme in (1e-39, 1e39):
        with pytest.raises(ValueError, match="positive and finite, got 1e"):
            model.set_gradient_divide_factor(extreme)


@pytest.mark.parametrize("mesh_shape", [(4,), (4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("schedule", ["F", "NF", "RF", "RNF"])
@large_from(1)
@on_threads(4)
def test_what_is_divided_while_it_is_packed_fits_what_was_reduced_before(schedule, mesh_shape):
    model = make(mesh_shape)
    run(model, schedule, float(dist.get_rank()), 1.0)
    assert values(model) == {"a": 1.5 * len(schedule), "b": len(schedule)}
