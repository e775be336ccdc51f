"""Replicated modules: gradients that are put into their bucket as they arrive."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.models import Made, Table
from tests.support.ranks import on_ranks
from tests.support.replicated import Pair, run


@on_ranks(2)
def test_large_gradients_do_not_wait_for_the_bucket():
    """While the first layer computes, the largest gradient is no tensor of its own any more."""
    pair = Pair(bucket_cap_mb=25)
    pair.steps(range(2))
    largest, seen = pair.ours.blocks[1].linear.weight, []

    def watched(model, x):
        output = model(x)
        first = model.blocks[0].linear.bias
        handle = first.register_hook(lambda _: seen.append(largest.grad))
        integer_loss(output).backward()
        handle.remove()

    pair.step(2, ours=watched)
    with pair.ours.no_sync():
        pair.backward(3, ours=watched)
        pair.backward(4, ours=watched)
    pair.backward(5, ours=watched)
    assert seen == [None] * 4
    pair.compare()
    pair.assert_views()


@on_ranks(2)
@pytest.mark.parametrize("mode", GradientSync)
def test_gradients_may_arrive_in_parts(mode):
    """Those of a part that is used in two reentrant checkpoints, and outside of them."""

    def forward(m, x):
        def recomputed(x):
            return checkpoint(m.inner, x, use_reentrant=True)

        x = (x + 0.0).requires_grad_()
        for run_inner in (recomputed, m.inner, recomputed):
            x = m.widen(run_inner(x))
        return x[:, :4]

    widen = nn.Linear(4, 7, bias=False)
    widen.weight.data = torch.eye(7)[:, :4].clone()
    pair = Pair(Made(forward, inner=IntegerModel(1), widen=widen), bucket_cap_mb=25)
    for window in range(3):
        for number in range(2):
            with meshard.gradient_sync(pair.ours, mode):
                pair.backward(3 * window + number)
        pair.backward(3 * window + 2)
        pair.compare()
        pair.update()


@on_ranks(2)
def test_hooks_of_parameters_and_on_arrived_gradients_see_those_of_one_microbatch():
    pair = Pair(bucket_cap_mb=25)
    of_params, of_bucket = [], []
    for param in pair.ours.parameters():
        param.register_post_accumulate_grad_hook(lambda p: of_params.append(p.grad.sum().item()))
    hook = SimpleNamespace(arrived=lambda flat: of_bucket.append(flat.sum().item()))
    for has_hook in (False, True):
        handle = meshard.register_reduce_hook(pair.ours, hook) if has_hook else None
        for number in range(4):
            alone = IntegerModel()
            alone.load_state_dict(pair.plain.state_dict())
            run(alone, integer_batch(number, dist.get_rank()))
            wanted = sum(param.grad.sum().item() for param in alone.parameters())
            with contextlib.nullcontext() if number % 2 else pair.ours.no_sync():
                pair.backward(number)
            assert sum(of_params) == wanted
            assert of_bucket == [wanted] * has_hook
            of_params.clear()
            of_bucket.clear()
            if number % 2:
                pair.compare()
                pair.update()
        if handle is not None:
            handle.remove()


@on_ranks(2)
def test_parameters_that_are_used_late_in_a_window():
    model = meshard.replicate(Table([(4,), (5,), (6,)]))
    seen = []
    hook = SimpleNamespace(before=lambda flat: seen.append(flat.clone()))
    meshard.register_reduce_hook(model, hook)

    def backward(*used):
        ones = [torch.ones_like(p) if i in used else None for i, p in enumerate(model.params)]
        model(torch.zeros((), requires_grad=True), ones).backward()

    for _ in range(2):
        with model.no_sync():
            backward(0)
            backward(2)
            backward(1, 2)
        backward(0)
        assert [param.grad.unique().tolist() for param in model.params] == [[2], [1], [2]]
        assert seen.pop().sum() == 4 * 2 + 5 + 6 * 2
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_backward_that_fails_leaves_nothing(accumulates):
    pair = Pair(bucket_cap_mb=25)
    pair.steps(range(2))
    if accumulates:
        with pair.ours.no_sync():
            run(pair.ours, integer_batch(2, dist.get_rank()))
    handle = pair.ours.blocks[0].linear.bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(pair.ours, integer_batch(3, dist.get_rank()))
    handle.remove()
    pair.ours.zero_grad()
    pair.steps(range(4, 6))
    pair.assert_views()
