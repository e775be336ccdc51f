"""Losses that use tensors which a unit has stored, beside or in the place of its output."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from tests.support.integer_model import IntegerModel, fill_with_halves, integer_loss, ternary
from tests.support.models import Made
from tests.support.ranks import on_threads
from tests.support.replicated import Pair

OUTPUTS = {  # that do not require grad
    "detached": lambda x, stored: stored.detach(),
    "a mask": lambda x, stored: stored > 0,
    "integers": lambda x, stored: stored.argmax(-1),
    "its input": lambda x, stored: x,
}


def with_router(output, *, is_first):
    """Return a model whose router stores what it computes, and returns ``output`` of it."""

    def route(router, x):
        router.stored = router.down(ternary(router.up(x)))
        return output(x, router.stored)

    def forward(model, x):
        if is_first:
            return ternary(model.body(x)) * (model.router(x).sum() > 0)
        h = ternary(model.body(x))
        chosen = model.router(h.detach() if output is OUTPUTS["its input"] else h)
        return h * (chosen.sum() > 0)

    dim = IntegerModel.in_dim if is_first else 4
    router = Made(route, up=nn.Linear(dim, 3), down=nn.Linear(3, 4))
    return fill_with_halves(Made(forward, body=nn.Linear(IntegerModel.in_dim, 4), router=router))


def shard(model, units=("body", "router"), **options):
    for name in units:
        meshard.fully_shard(model.get_submodule(name), **options)
    return meshard.fully_shard(model)


def with_balance(model, x):
    """Add the router's own loss to that of the output."""
    out = model(x)
    (integer_loss(out) + integer_loss(model.router.stored)).backward()
    model.router.stored = None


def in_two_backwards(model, x):
    out = model(x)
    integer_loss(model.router.stored).backward(retain_graph=True)
    integer_loss(out).backward()
    model.router.stored = None


def in_no_backward(model, x):
    """Leave the stored tensor out of the loss: its unit must not stay unsharded for good."""
    integer_loss(model(x)).backward()
    model.router.stored = None


@pytest.mark.parametrize("place", ["behind a unit", "on the inputs"])
@pytest.mark.parametrize("output", list(OUTPUTS))
@on_threads(2)
def test_a_stored_tensor_of_a_unit_whose_output_needs_no_grad(output, place):
    model = with_router(OUTPUTS[output], is_first=place == "on the inputs")
    Pair(model, make=shard).steps(range(2), with_balance, with_balance)


@pytest.mark.parametrize("step", [in_two_backwards, in_no_backward])
@on_threads(2)
def test_a_stored_tensor_in_a_backward_of_its_own_or_in_none(step):
    model = with_router(OUTPUTS["detached"], is_first=False)
    Pair(model, make=shard).steps(range(3), step, step)


@on_threads(2)
def test_a_unit_whose_stored_tensor_was_in_no_loss_is_sharded_after_the_next_backward():
    model = shard(with_router(OUTPUTS["detached"], is_first=False))
    for _ in range(2):
        in_no_backward(model, torch.ones(1, IntegerModel.in_dim))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("uses_output", [True, False])
@on_threads(2)
def test_a_stored_tensor_beside_an_output_that_needs_grad_is_refused_by_torch(uses_output):
    """The unit is resharded after its forward: its output says when it is needed again."""

    def forward(model, x):
        h = ternary(model.body(x))
        out = model.router(h)
        return h + out if uses_output else h

    model = with_router(lambda x, stored: ternary(stored), is_first=False)
    model._function = forward
    pair = Pair(model, make=shard)
    pair.ours(torch.ones(1, IntegerModel.in_dim))
    with pytest.raises(RuntimeError, match="storage of size 0"):
        integer_loss(pair.ours.router.stored).backward()
    pair.ours.reset_iter_state()
    pair.steps(range(2), in_no_backward, in_no_backward)


@on_threads(2)
def test_a_loss_that_the_only_unit_stores_beside_a_detached_output():
    def forward(model, x):
        out = model.layer(x)
        model.loss = integer_loss(out)
        return out.detach()

    def step(model, x):
        model(x)
        model.loss.backward()
        model.loss = None

    plain = fill_with_halves(Made(forward, layer=nn.Linear(IntegerModel.in_dim, 4)))
    pair = Pair(plain, make=meshard.fully_shard)
    for number in range(2):
        pair.step(number, ours=step, plain=step)


@pytest.mark.parametrize("units", [["head"], ["body", "head"]])
@pytest.mark.parametrize("order", [("stored", "head"), ("head", "stored")])
@on_threads(2)
def test_a_stored_loss_and_that_of_a_head_on_detached_features_in_backwards_of_their_own(
    order, units
):
    def forward(model, x):
        features = ternary(model.body(x))
        model.loss = integer_loss(features)
        return features.detach()

    def step(model, x):
        losses = {"head": integer_loss(model.head(model(x))), "stored": model.loss}
        for name in order:
            losses[name].backward()
        model.loss = None

    layers = {"body": nn.Linear(IntegerModel.in_dim, 4), "head": nn.Linear(4, 3)}
    pair = Pair(
        fill_with_halves(Made(forward, **layers)),
        make=lambda model: shard(model, units, reshard_after_forward=False),
    )
    pair.steps(range(2), step, step)
