"""Replicated modules that are nearly empty, cast in part, or leave parameters out."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support.integer_model import IntegerModel
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import SMALL, Pair


class CastInPart(IntegerModel):
    """Computes each block in the dtype of its weight."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x.to(block.linear.weight.dtype))
        return x.to(self.shift.dtype) + self.shift


@on_ranks(2)
@pytest.mark.parametrize(
    ("when", "keep_grads", "cap"),
    [(1, False, SMALL), (1, True, 25), (3, False, 25), (3, True, SMALL)],
)
def test_a_submodule_may_be_cast(when, keep_grads, cap):
    pair = Pair(CastInPart(), bucket_cap_mb=cap)
    for number in range(5):
        if number == when:
            for model in (pair.ours, pair.plain):
                model.blocks[1].double()
            # Gradients that are there are cast too, by torch; so they are others now.
        if keep_grads and number == when:
            with pytest.warns(UserWarning, match="replaced by another tensor"):
                pair.backward(number)
        else:
            pair.backward(number)
        pair.compare()
        if not keep_grads:
            pair.update()


@on_threads(2)
def test_a_cast_counts_for_what_is_sent():
    """Gradients have the bits of the new dtype, on the wire too."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    meshard.replicate(model)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        model.zero_grad()
    model[0].double()
    third = torch.full((1, 1), 1 / 3, dtype=torch.float64)
    model(third).sum().backward()
    assert model[0].weight.grad.item() == 1 / 3
    model(third).sum().backward()
    assert model[0].weight.grad.item() == 2 / 3


@on_threads(2)
def test_modules_without_trainable_parameters():
    nothing = meshard.replicate(nn.Identity())
    assert torch.equal(nothing(torch.ones(2)), torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    nothing(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
    frozen = meshard.replicate(nn.Linear(2, 2).requires_grad_(False))
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(3):
        frozen(x).sum().backward()
    assert frozen.weight.grad is None
    buffers = nn.BatchNorm1d(2, affine=False)
    meshard.replicate(buffers, broadcast_buffers=True)
    for _ in range(3):
        buffers(torch.full((2, 2), float(dist.get_rank())))
    sent = buffers.running_mean.clone()
    dist.broadcast(sent, 0)
    assert dist.get_rank() == 0 or not torch.equal(buffers.running_mean, sent)


@on_threads(2)
def test_ignored_parameters_are_left_alone():
    """What is ignored is left as it is: not sent at first, nor its gradient reduced."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(model[1].weight, float(rank))
    meshard.replicate(model, ignored_params={model[1].weight})
    assert (model[1].weight == rank).all()
    for _ in range(3):
        out = model(torch.full((1, 2), 1.0 + rank))
        expected = torch.autograd.grad(out.sum(), model[1].weight, retain_graph=True)[0]
        out.sum().backward()
        assert torch.equal(model[1].weight.grad, expected)
        model.zero_grad()


class InAnotherOrder(nn.Module):
    """Uses its parameters in the order in which it lists them backwards."""

    def __init__(self):
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16] * 4
        sizes = [3, 40, 50, 5, 20, 60, 70, 9]
        self.params = nn.ParameterList(
            nn.Parameter(torch.ones(size, dtype=dtype))
            for size, dtype in zip(sizes, dtypes, strict=True)
        )

    def forward(self, x):
        for param in reversed(list(self.params)):
            x = x + (param.float() * x.detach().mean()).sum()
        return x


@on_threads(2)
def test_buckets_made_anew_have_one_dtype_each():
    model = meshard.replicate(InAnotherOrder(), bucket_cap_mb=2e-4)

    def dtypes():
        groups = [unit.group for unit in model._meshard_buckets.units if unit.params]
        assert sum(len(group.params) for group in groups) == 8
        return [{param.sharded.dtype for param in group.params} for group in groups]

    assert all(len(found) == 1 for found in dtypes())
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        model.zero_grad()
    assert all(len(found) == 1 for found in dtypes())
