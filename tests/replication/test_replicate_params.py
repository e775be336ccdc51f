"""Replicated modules: the parameters they may have, and what may become of them."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import meshard
from tests.support.integer_model import IntegerModel, integer_batch, ternary
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import SMALL, Pair, run
from tests.support.spread import spread


class Strange(nn.Module):
    """Convolutions, a scalar, an empty parameter, a tie, a frozen one and one never used."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def values(*shape):
            return nn.Parameter(torch.randint(-2, 3, shape, generator=generator) / 2)

        self.first = values(4, 2, 3, 3)
        self.depthwise = values(4, 1, 3, 3)
        self.transposed = nn.Parameter(values(4, 6).data.t())
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = values(0, 3)
        self.head = values(6, 6)
        self.tied = self.head
        self.frozen = values(6).requires_grad_(False)
        self.unused = values(3)

    def forward(self, x):
        x = x.repeat(1, 6)[:, :32].view(-1, 2, 4, 4)
        x = ternary(functional.conv2d(x, self.first, padding=1))
        x = ternary(functional.conv2d(x, self.depthwise, padding=1, groups=4)).sum((2, 3))
        x = ternary(ternary(x @ self.transposed.t()) * self.scalar + self.frozen + self.empty.sum())
        return ternary(ternary(x @ self.head) @ self.tied)


@on_threads(2)
@spread(memory_format=[torch.contiguous_format, torch.channels_last], as_views=[True, False])
def test_all_sorts_of_parameters(memory_format, as_views):
    model = Strange()
    for name in ("first", "depthwise"):
        param = getattr(model, name)
        param.data = param.data.to(memory_format=memory_format)
    pair = Pair(model, gradient_as_bucket_view=as_views)
    assert len(pair.ours._meshard_buckets.units) > 2
    pair.steps(range(4))
    pair.backward(4)
    assert pair.ours.unused.grad is pair.ours.frozen.grad is None
    assert pair.ours.scalar.grad.shape == () and pair.ours.empty.grad.shape == (0, 3)
    assert pair.ours.transposed.grad.stride() == (1, 6)
    if as_views:
        pair.assert_views()


@on_threads(2)
@pytest.mark.parametrize("when", [0, 1, 2])
def test_parameters_may_be_replaced(when):
    pair = Pair()
    for number in range(4):
        if number == when:
            for model in pair.both:
                old = model.blocks[1].linear.weight
                model.blocks[1].linear.weight = nn.Parameter(-old.detach())
                model.blocks[2].linear.bias.data = -model.blocks[2].linear.bias.data
            pair.renew_optimizers()
        pair.step(number)
    pair.backward(4)
    pair.assert_views()


@on_threads(1)
def test_a_replacement_of_another_shape_is_refused():
    model = meshard.replicate(IntegerModel())
    model.shift = nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"'shift' of .* was replaced after replicate"):
        model(integer_batch(0, 0))


@on_threads(2)
@spread(when=[0, 1, 2], assign=[True, False])
def test_state_dicts_are_those_of_the_plain_module(assign, when):
    pair = Pair()
    assert list(pair.ours.state_dict()) == list(pair.plain.state_dict())
    for number in range(4):
        if number == when:
            state = IntegerModel(seed=5).state_dict()
            for model in pair.both:
                model.load_state_dict(copy.deepcopy(state), assign=assign)
            if assign:
                pair.renew_optimizers()
        pair.step(number)
    pair.backward(4)
    pair.assert_views()


@on_threads(2)
@spread(when=[0, 1, 2], keep_grads=[True, False])
def test_modules_may_be_cast(when, keep_grads):
    pair = Pair()
    for number in range(4):
        if number == when:
            for model in pair.both:
                model.to(torch.float64)
        kwargs = {}
        if number >= when:
            kwargs = dict.fromkeys(("ours", "plain"), lambda m, x: run(m, x.double()))
        pair.backward(number, **kwargs)
        pair.compare()
        if not keep_grads:
            pair.update()
    pair.assert_views()


@on_threads(2)
@spread(when=[0, 1, 3], as_views=[True, False])
def test_deep_copies_train_by_themselves(when, as_views):
    pair = Pair(gradient_as_bucket_view=as_views)
    pair.steps(range(when))
    pair.backward(8)
    twin = copy.deepcopy(pair.ours)
    assert isinstance(twin, meshard.ReplicateModule) and isinstance(twin, IntegerModel)
    plain_twin = copy.deepcopy(pair.plain)
    assert all(param.grad is None for param in twin.parameters())  # as of any module
    pair.update()
    pair.steps((9, 10))
    other = copy.copy(pair)
    other.ours, other.plain = twin, plain_twin
    other.renew_optimizers()
    other.steps((11, 12, 13))
    pair.step(15)
    for each in (pair, other):
        each.backward(16)
        each.compare()
        grads = [param.grad for param in each.ours.parameters()]
        assert all((grad._base is None) for grad in grads)
        assert (len({grad.untyped_storage().data_ptr() for grad in grads}) < 7) is as_views


@on_ranks(2)
def test_gradients_may_be_exchanged():
    """Gradients of two parameters are exchanged: each lies where the other belongs."""
    pair = Pair(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), bucket_cap_mb=25)
    for model in pair.both:
        for param in model.parameters():
            param.data = param.data.mul(4).round()

    def forward(model, x):
        model(x).sum().backward()

    for number in range(3):
        pair.backward(2 * number, forward, forward)
        for model in pair.both:
            one, two = model[0].weight, model[1].weight
            one.grad, two.grad = two.grad, one.grad
        with pytest.warns(UserWarning, match="replaced") if not number else nullcontext():
            pair.backward(2 * number + 1, forward, forward)
        pair.compare()
        pair.zero_grad()
    assert pair.ours.num_replaced_gradients == 6


@on_threads(2)
def test_sparse_gradients_become_dense():
    """An embedding with sparse gradients, of which each rank uses other rows."""
    table = nn.Embedding(10, 3, sparse=True)
    nn.init.constant_(table.weight, 1.0)
    model = nn.Sequential(table, nn.Linear(3, 2, bias=False))
    nn.init.constant_(model[1].weight, 2.0)
    plain = copy.deepcopy(model)
    plain[0].sparse = False
    meshard.replicate(model, bucket_cap_mb=SMALL).set_gradient_divide_factor(1.0)
    rank = dist.get_rank()
    for number in range(3):
        model(torch.tensor([number, number, rank])).sum().backward()
        for each in range(2):
            plain(torch.tensor([number, number, each])).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


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
            for model in pair.both:
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
