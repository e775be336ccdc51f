"""Whose is the memory of a sharded gradient, and when is it freed?"""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard._engine.unit import units_in
from meshard._torch.dtensor import local_of
from tests.engine.test_lifetime import settled_tensor_bytes
from tests.support.cases import CASES
from tests.support.parity import assert_same, full_grads

CASE = CASES["mlp_stack"]


def sharded(mesh_shape, **kwargs):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = CASE.build()
    for unit in CASE.units(model):
        meshard.fully_shard(unit, mesh, **kwargs)
    return model


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def given_back():
    """Return the bytes that zero_grad gives back, and those of the gradients."""
    model = sharded((2,))
    batch = CASE.batch(torch.distributed.get_rank(), 0)
    for _ in range(2):
        model.zero_grad()
        CASE.loss(model(batch)).backward()
    flats = {id(unit): unit.gradients.sharded.flat.nbytes for unit in units_in(model)}
    before = settled_tensor_bytes()
    model.zero_grad()
    return before - settled_tensor_bytes(), sum(flats.values())


def test_zero_grad_frees_gradients_to_the_byte(run_ranks):
    for found, flat in run_ranks(given_back, 2):
        assert found == flat


def cast_between_steps():
    model = sharded((2,))
    batch = CASE.batch(torch.distributed.get_rank(), 0)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        CASE.loss(model(batch.to(dtype))).backward()
        assert {grad.dtype for grad in grads_of(model).values()} == {dtype}
        model.zero_grad()


def test_parameters_may_change_their_dtype(run_ranks):
    run_ranks(cast_between_steps, 2)


def first_local(model):
    return next(iter(grads_of(model).values())).to_local()


def save_in_graph(model):
    weight = torch.ones_like(first_local(model), requires_grad=True)
    product = (first_local(model) * weight).sum()

    def value():
        (gradient,) = torch.autograd.grad(product, weight)
        return gradient

    return value


# What somebody holds of the first gradient of a model, as a function that reads it.
HOLDERS = {
    "gradient": lambda model: next(iter(grads_of(model).values())).to_local,
    "local tensor": lambda model: local_of(next(iter(grads_of(model).values()))).clone,
    "view": lambda model: first_local(model).view(-1)[:].clone,
    "numpy": lambda model: partial(torch.from_numpy, first_local(model).numpy()),
    "detached": lambda model: first_local(model).detach().clone,
    "graph": save_in_graph,
    "flat": lambda model: next(units_in(model)).gradients.sharded.flat[:].clone,
}


def held_gradients(holder):
    model, other = sharded((2,)), CASE.build()
    seen, previous = [], None
    for step in range(6):
        CASE.loss(model(CASE.batch(torch.distributed.get_rank(), step))).backward()
        for rank in range(2):
            (CASE.loss(other(CASE.batch(rank, step))) / 2).backward()
        assert_same(full_grads(model), full_grads(other))
        if previous is not None:
            read, expected = previous
            torch.testing.assert_close(read().reshape(-1), expected, rtol=0, atol=0)
        expected = (
            next(units_in(model)).gradients.sharded.flat if holder == "flat" else first_local(model)
        )
        previous = HOLDERS[holder](model), expected.reshape(-1).clone()
        seen.append({name: id(grad) for name, grad in grads_of(model).items()})
        del expected
        for each in (model, other):
            each.zero_grad()
    return seen


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_a_gradient_keeps_it(run_ranks, holder):
    run_ranks(held_gradients, 2, holder)
