"""Do sharded gradients stay where they are, with the same numbers, if their memory is kept?"""

from functools import partial
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard._engine.unit import units_in
from meshard._torch.dtensor import local_of
from tests.support.cases import CASES
from tests.support.covering import covering
from tests.support.live_memory import settled_tensor_bytes
from tests.support.parity import assert_same, full_grads, own_grads

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


def same_bits(mesh_shape, modes, to_none):
    kept, other = sharded(mesh_shape), sharded(mesh_shape)
    kept.set_keep_gradient_memory(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (kept, other)]
    rank = torch.distributed.get_rank()
    places = []
    for step in range(4):
        for number, mode in enumerate(modes):
            for model in (kept, other):
                with meshard.gradient_sync(model, meshard.GradientSync(mode)):
                    CASE.loss(model(CASE.batch(rank, 10 * step + number))).backward()
        assert_same(own_grads(kept), own_grads(other), bitwise=True)
        grads = grads_of(kept)
        places.append({name: (id(g), g.to_local().data_ptr()) for name, g in grads.items()})
        for model, optimizer in zip((kept, other), optimizers, strict=True):
            meshard.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            for grad in grads.values():
                grad.to_local().fill_(float("nan"))  # is nobody's now, and must not show
    assert places[1] == places[2] == places[3]


MODES = [("full",), ("none", "reduce_scatter", "full"), ("full", "full")]


@covering("mesh_shape, modes, to_none", product([(2,), (2, 2), (3,)], MODES, [True, False]))
def test_the_same_tensors_hold_the_same_bits(run_ranks, mesh_shape, modes, to_none):
    run_ranks(same_bits, torch.Size(mesh_shape).numel(), mesh_shape, modes, to_none)


def given_back(keep):
    """Return the bytes that zero_grad gives back, and those of the gradients."""
    model = sharded((2,))
    model.set_keep_gradient_memory(keep)
    batch = CASE.batch(torch.distributed.get_rank(), 0)
    for _ in range(2):
        model.zero_grad()
        CASE.loss(model(batch)).backward()
    flats = {id(unit): unit.gradients.sharded.flat.nbytes for unit in units_in(model)}
    before = settled_tensor_bytes()
    model.zero_grad()
    return before - settled_tensor_bytes(), sum(flats.values())


@pytest.mark.parametrize("keep", [True, False])
def test_the_memory_is_kept_to_the_byte(run_ranks, keep):
    for found, flat in run_ranks(given_back, 2, keep):
        assert found == (0 if keep else flat)


def turned_off():
    model = sharded((2,))
    model.set_keep_gradient_memory(True)
    batch = CASE.batch(torch.distributed.get_rank(), 0)
    CASE.loss(model(batch)).backward()
    first = grads_of(model)
    model.set_keep_gradient_memory(False)
    model.zero_grad()
    values = {name: grad.to_local().clone() for name, grad in first.items()}
    CASE.loss(model(batch)).backward()
    for name, grad in grads_of(model).items():
        assert grad is not first[name]
        assert torch.equal(first[name].to_local(), values[name])  # whoever keeps one keeps it
    with pytest.raises(TypeError, match="must be a bool"):
        model.set_keep_gradient_memory(1)


def test_it_can_be_turned_off(run_ranks):
    run_ranks(turned_off, 2)


def cast_between_steps():
    model = sharded((2,))
    model.set_keep_gradient_memory(True)
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


def steps_alone(num_steps):
    model = sharded((2,))
    places = []
    for step in range(num_steps):
        CASE.loss(model(CASE.batch(torch.distributed.get_rank(), step))).backward()
        places.append({name: id(grad) for name, grad in grads_of(model).items()})
        model.zero_grad()
        assert all(unit.gradients.sharded.flat is None for unit in units_in(model))
    return places


def test_where_nobody_does_the_objects_are_the_same_ones(run_ranks):
    for places in run_ranks(steps_alone, 2, 4):
        assert places[0] == places[1] == places[2] == places[3]
