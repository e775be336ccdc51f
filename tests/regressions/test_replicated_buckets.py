"""Buckets of ``replicate`` that are used again while something else holds them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import GradientSync
from tests.support.models import Made
from tests.support.ranks import on_threads


def ones():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class Arrived:
    def arrived(self, gradients):
        assert gradients.numel() == 1


@pytest.mark.parametrize("has_hook", [False, True])
@on_threads(2)
def test_a_microbatch_without_gradients_leaves_a_bucket_in_flight_alone(has_hook):
    is_used = [True]
    model = Made(
        lambda m, x: m.layer(x) if is_used[0] else x.clone().requires_grad_(), layer=ones()
    )
    meshard.replicate(model)
    if has_hook:
        meshard.register_reduce_hook(model, Arrived())
    model.set_manual_backward_finalization(True)
    for x, sync, ranks in ((1, "FULL", {0, 1}), (10, "NONE", {0}), (100, "FULL", {0, 1})):
        is_used[0] = dist.get_rank() in ranks
        with meshard.gradient_sync(model, GradientSync[sync]):
            model(torch.full((1, 1), float(x))).sum().backward()
    model.finalize_backward()
    assert model.layer.weight.grad.item() == 1 + 10 / 2 + 100


@on_threads(2)
def test_a_replicated_module_may_get_one_root_after_another():
    inner = meshard.replicate(ones())
    for _ in range(2):
        inner(torch.ones(1, 1)).sum().backward()
        inner.zero_grad()
    middle = meshard.replicate(nn.Sequential(inner, ones()))
    middle(torch.ones(1, 1)).sum().backward()
    outer = meshard.replicate(nn.Sequential(middle, ones()))
    outer(torch.full((1, 1), 10.0)).sum().backward()
    assert inner.weight.grad.item() == 11
