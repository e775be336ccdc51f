"""Replicated modules: graphs, hooks and windows."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import Pair, run


def smooth():
    return seeded(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), 0)


def penalty_of_inputs(model, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def penalty_of_parameters(model, x):
    output = model(x)
    slopes = torch.autograd.grad(output.square().sum(), [*model.parameters()], create_graph=True)
    (output.sum() + sum(slope.square().sum() for slope in slopes)).backward()


@on_ranks(2)
@pytest.mark.parametrize("way", [penalty_of_inputs, penalty_of_parameters])
def test_gradients_of_gradients(way):
    pair = Pair(smooth().double())

    def double(model, x):
        way(model, x.double())

    for number in range(4):
        pair.backward(number, double, double)
        assert_same(full_grads(pair.ours), full_grads(pair.plain), torch.float64)
        pair.ours.zero_grad()
        pair.plain.zero_grad()
    assert pair.ours.num_replaced_gradients == 0


@on_ranks(2, timeout=120)
@pytest.mark.parametrize(
    "what",
    ["blocks", *(pytest.param(each, marks=pytest.mark.slow) for each in ("module", "wrapper"))],
)
def test_compiled(what):
    model = smooth()
    if what == "blocks":
        for layer in model:
            layer.compile(backend="aot_eager")
    pair = Pair(model)
    if what == "module":
        pair.ours.compile(backend="aot_eager")
    called = torch.compile(pair.ours, backend="aot_eager") if what == "wrapper" else pair.ours

    def way(model, x):
        (called if model is pair.ours else model)(x).square().sum().backward()

    with warnings.catch_warnings():
        # torch asks inputs that are no leaves for their gradients while it traces.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for number in range(4):
            pair.backward(number, way, way)
            assert_same(full_grads(pair.ours), full_grads(pair.plain))
            pair.ours.zero_grad()
            pair.plain.zero_grad()
        pair.backward(4, way, way)
    pair.assert_views()


@on_ranks(2)
def test_forward_may_be_called_directly():
    pair = Pair()

    def way(model, x):
        integer_loss(model.forward(x)).backward()

    pair.steps(range(3), way, way)


@on_ranks(2)
def test_hooks_may_return_other_tensors():
    pair, seen = Pair(), []
    pair.ours.shift.register_post_accumulate_grad_hook(seen.append)
    for model in (pair.ours, pair.plain):
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clone() * 2)
    pair.steps(range(3))
    assert len(seen) == 3  # of this rank alone


class Around(nn.Module):
    """A plain module around a replicated one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.inner(x) + self.shift


@on_ranks(2)
def test_modules_around_may_be_copied():
    pair = Pair()
    pair.steps(range(2))
    twin = copy.deepcopy(Around(pair.ours))
    assert isinstance(twin.inner, meshard.ReplicateModule)
    plain = Around(copy.deepcopy(pair.plain))
    for number in range(3):
        run(twin, integer_batch(number, dist.get_rank()))
        for rank in range(2):
            run(plain, integer_batch(number, rank))
        assert_same(full_grads(twin.inner), full_grads(plain.inner), bitwise=True)
    pair.steps(range(3, 5))


@on_ranks(2)
def test_parts_of_a_model_may_be_replicated_by_themselves():
    model = IntegerModel()
    meshard.replicate(model.blocks[0])
    meshard.replicate(model.blocks[1])
    run(model, integer_batch(0, dist.get_rank()))
    for block in model.blocks[:2]:
        weight = block.linear.weight.grad.clone()
        dist.broadcast(weight, 0)
        assert torch.equal(weight, block.linear.weight.grad)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, *, recomputes):
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=True) if recomputes else self.second(x)


@on_threads(2)
def test_a_recomputation_does_not_rebuild_buckets():
    """The first backward recorded the order; the next forward is one that a backward runs again."""
    plain = seeded(Recomputed())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for unit in (model.second, model):
        meshard.replicate(unit, mesh)

    def step(module, rank, share):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
        outputs = [module(x, recomputes=False), module(x + 1, recomputes=True)]
        for output in outputs:
            (output.square().sum() * share).backward()

    for _ in range(2):
        step(model, dist.get_rank(), 1.0)
        for rank in range(2):
            step(plain, rank, 0.5)
    assert_same(full_grads(model), full_grads(plain))
