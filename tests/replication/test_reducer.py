"""The reducer of replicated modules at odd moments: each row was wrong once, or would be easily."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.integer_model import IntegerModel, fill_with_halves, integer_batch, ternary
from tests.support.integer_model import integer_loss as loss_of
from tests.support.models import Made
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import Pair, run


def two_layers():
    def forward(model, x):
        return model.a(x) + model.b(x) if model.uses_b else model.a(x)

    layers = {name: nn.Linear(IntegerModel.in_dim, 3) for name in "ab"}
    return fill_with_halves(Made(forward, uses_b=True, **layers))


def use_b(pair, uses):
    for model in pair.both:
        model.uses_b = uses


def of_first_rank(number):
    """Return ways to run the two layers, of which only the first rank uses the second."""
    first = integer_batch(number, 0)

    def ours(model, x):
        model.uses_b = dist.get_rank() == 0
        run(model, x)

    def plain(model, x):
        model.uses_b = torch.equal(x, first)
        run(model, x)

    return ours, plain


# --- manual finalization: the next backward begins while buckets are in flight --------------------


@on_ranks(2)
def test_backwards_before_a_finalization_in_which_ranks_use_different_parameters():
    pair = Pair(two_layers())
    pair.steps(range(2))
    pair.ours.set_manual_backward_finalization(True)
    for number in range(3):
        pair.backward(number, *of_first_rank(number))
    pair.ours.finalize_backward()
    pair.compare()


@on_threads(2)
def test_gradients_that_are_cleared_in_flight_do_not_clear_those_of_the_next_backward():
    pair = Pair()
    pair.steps(range(2))
    pair.ours.set_manual_backward_finalization(True)
    pair.backward(5)
    pair.zero_grad()
    pair.backward(6)
    pair.ours.finalize_backward()
    pair.compare()


# --- hooks on arrived gradients keep microbatches apart -------------------------------------------

ARRIVED = SimpleNamespace(arrived=lambda flat: None)


def clear_half(pair):
    for model in pair.both:
        torch.optim.SGD([*model.parameters()][:2], lr=0.1).zero_grad()


def begin_to_use(pair):
    use_b(pair, True)


def thaw(pair):
    for model in pair.both:
        model.b.requires_grad_(True)


def freeze(pair):
    for model in pair.both:
        model.b.requires_grad_(False)


@pytest.mark.parametrize("registered", ["before", "in the window"])
@pytest.mark.parametrize(
    ("before", "between"),
    [
        (None, clear_half),
        (lambda pair: use_b(pair, False), begin_to_use),
        (freeze, thaw),
    ],
    ids=["cleared", "used late", "thawed"],
)
@on_threads(2)
def test_what_earlier_microbatches_have_left_is_added_and_nothing_else(before, between, registered):
    pair = Pair(two_layers())
    pair.steps(range(2))
    if registered == "before":
        meshard.register_reduce_hook(pair.ours, ARRIVED)
    if before is not None:
        before(pair)
    pair.ours.set_gradient_sync(GradientSync.NONE)
    pair.backward(5)
    if registered != "before":
        meshard.register_reduce_hook(pair.ours, ARRIVED)
    between(pair)
    pair.ours.set_gradient_sync(GradientSync.FULL)
    pair.backward(6)
    pair.compare()


# --- hooks of the user on parameters --------------------------------------------------------------


class _MayBeUndefined(torch.autograd.Function):
    is_undefined = False

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), None if _MayBeUndefined.is_undefined else x.t() @ gradient


@pytest.mark.parametrize("without", ["a gradient", "requires_grad"])
@pytest.mark.parametrize("clears", [False, True])
@on_threads(1)
def test_a_hook_that_has_seen_a_gradient_takes_none_in_the_next_backward(clears, without):
    weight = nn.Parameter(torch.ones(IntegerModel.in_dim, 3))
    pair = Pair(Made(lambda m, x: _MayBeUndefined.apply(x, m.weight), weight=weight))
    for model in pair.both:
        model.weight.register_post_accumulate_grad_hook(lambda _: None)

    def way(model, x):
        out = model(x.requires_grad_()).sum()
        _MayBeUndefined.is_undefined = is_without and without == "a gradient"
        model.weight.requires_grad_(not is_without or without == "a gradient")
        out.backward()
        model.weight.requires_grad_(True)

    for number in range(4):
        is_without = number % 2 == 1
        pair.backward(number, way, way)
        pair.compare()
        if clears:
            pair.zero_grad()
    _MayBeUndefined.is_undefined = False


# --- several backwards bring gradients of one microbatch ------------------------------------------


def tied():
    def forward(model, x, uses_other):
        hidden = ternary(x @ model.weight) + model.bias
        return ternary(hidden + model.other if uses_other else hidden)

    sizes = {"weight": (7, 7), "bias": (7,), "other": (7,)}
    params = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    return fill_with_halves(Made(forward, **params))


@pytest.mark.parametrize("are_unequal", [False, True])
@on_threads(2, timeout=20)
def test_a_head_in_chunks_whose_weight_is_tied(are_unequal):
    pair = Pair(tied(), bucket_cap_mb=25)

    def way(model, x):
        out = model(x, not are_unequal or torch.equal(x, first))
        detached = out.detach().requires_grad_()
        loss_of(ternary(detached @ model.weight)).backward()
        out.backward(detached.grad)

    for number in range(3):
        first = integer_batch(number, 0)
        pair.step(number, way, way)


@on_threads(1)
def test_gradients_that_come_after_a_zero_grad_inside_the_backward_count():
    pair = Pair()
    pair.steps(range(2))
    for model in pair.both:
        model.blocks[1].register_full_backward_hook(lambda *_, model=model: model.zero_grad())
    for number in range(4):
        pair.backward(5 + number)
        pair.compare()
