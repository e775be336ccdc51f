"""Modules that a loss calls itself, with a backward before that of the unit that holds them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshard
from tests.support.integer_model import IntegerModel, fill_with_halves, integer_loss, ternary
from tests.support.models import Made
from tests.support.ranks import on_threads
from tests.support.replicated import Pair


def with_heads():
    """Return a model whose forward returns features, and leaves its heads to the loss."""
    return fill_with_halves(
        Made(
            lambda m, x: ternary(m.body(x)),
            body=nn.Linear(IntegerModel.in_dim, 4),
            head=nn.Linear(4, 3, bias=False),
            other=nn.Linear(4, 3, bias=False),
        )
    )


def shard(model, **options):
    """Make the named members units, each with its ``reshard_after_forward``, and the root."""
    for name, reshard in options.items():
        meshard.fully_shard(model.get_submodule(name), reshard_after_forward=reshard)
    return meshard.fully_shard(model)


def check(step, **units):
    Pair(with_heads(), make=partial(shard, **units)).steps(range(2), step, step)


@on_threads(2)
def test_a_gradient_that_no_forward_of_its_unit_has_brought_is_pending():
    """A loss calls the head, leaves out what that returned, and reads the weight of the head."""

    def step(model, x):
        h = model(x)
        model.head(h.detach())
        integer_loss(F.linear(h, model.head.weight)).backward()
        if isinstance(model, meshard.FSDPModule):
            with pytest.raises(RuntimeError, match=r"unit 'head' .*finalize_gradients"):
                meshard.clip_grad_norm_(model, 1.0)
            meshard.finalize_gradients(model)

    check(step, body=True, head=False)


def in_chunks(num_chunks, model, x):
    """Run the head on parts of the features, with a backward in each, and then the trunk."""
    h = model(x)
    d = h.detach().requires_grad_()
    for chunk in d.tensor_split(num_chunks):
        integer_loss(model.head(chunk)).backward()
    h.backward(d.grad)


def in_chunks_without_grad(num_chunks, model, x):
    """Run the head on parts of features that take no gradient; the trunk has another loss."""
    h = model(x)
    for chunk in h.detach().tensor_split(num_chunks):
        integer_loss(model.head(chunk)).backward()
    integer_loss(h).backward()


def two_heads(model, x):
    h = model(x)
    d = h.detach().requires_grad_()
    for head in (model.head, model.other):
        integer_loss(head(d)).backward()
    h.backward(d.grad)


def two_heads_and_then_their_backwards(model, x):
    h = model(x)
    d = h.detach().requires_grad_()
    for loss in [integer_loss(head(d)) for head in (model.head, model.other)]:
        loss.backward()
    h.backward(d.grad)


def probe_trained_apart(model, x):
    """Train a probe on features that pass no gradient on, before the head and the trunk."""
    h = model(x)
    integer_loss(model.other(h.detach())).backward()
    integer_loss(model.head(h)).backward()


def read_without_grad(model, x):
    """Evaluate the head on all features, between its backward and that of the trunk."""
    h = model(x)
    d = h.detach().requires_grad_()
    integer_loss(model.head(d)).backward()
    with torch.no_grad():
        F.linear(h, model.head.weight)
    h.backward(d.grad)


STEPS = {
    "1 chunk": partial(in_chunks, 1),
    "2 chunks": partial(in_chunks, 2),
    "3 chunks": partial(in_chunks, 3),
    "1 chunk without grad": partial(in_chunks_without_grad, 1),
    "2 chunks without grad": partial(in_chunks_without_grad, 2),
    "two heads": two_heads,
    "two heads, then two backwards": two_heads_and_then_their_backwards,
    "a probe": probe_trained_apart,
    "a read under no_grad": read_without_grad,
}
IN_ROOT = list(STEPS)


@pytest.mark.parametrize("trunk", ["in the root", "a unit"])
@pytest.mark.parametrize("how", IN_ROOT)
@on_threads(2)
def test_a_head_in_the_unit_of_the_root_may_have_backwards_before_that_of_the_root(how, trunk):
    check(STEPS[how], **({"body": True} if trunk == "a unit" else {}))


# A unit that is read after its own backward is sharded, as with FSDP2.
@pytest.mark.parametrize("how", [name for name in STEPS if name != "a read under no_grad"])
@on_threads(2)
def test_heads_that_are_inner_units_and_keep_their_weights(how):
    check(STEPS[how], head=False, other=False)
