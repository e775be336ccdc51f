"""Replicated modules: the parameters they may have, and what may become of them."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import meshard
from tests.support.against_plain import check_training
from tests.support.insides import large_from
from tests.support.integer_model import IntegerModel, integer_batch, ternary
from tests.support.models import Made, seeded
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import SMALL, Pair, bucket_sizes
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
    assert len(bucket_sizes(pair.ours)) > 2
    pair.steps(range(4))
    pair.backward(4)
    assert pair.ours.unused.grad is pair.ours.frozen.grad is None
    assert pair.ours.scalar.grad.shape == () and pair.ours.empty.grad.shape == (0, 3)
    assert pair.ours.transposed.grad.stride() == (1, 6)
    if as_views:
        pair.assert_views()


def replace(model):
    old = model.blocks[1].linear.weight
    model.blocks[1].linear.weight = nn.Parameter(-old.detach())
    model.blocks[2].linear.bias.data = -model.blocks[2].linear.bias.data


def load(model, *, assign=False):
    model.load_state_dict(copy.deepcopy(IntegerModel(seed=5).state_dict()), assign=assign)


@on_threads(2)
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("change", [replace, load, partial(load, assign=True)])
def test_parameters_may_be_replaced_and_loaded(change, when):
    pair = Pair()
    assert list(pair.ours.state_dict()) == list(pair.plain.state_dict())
    for number in range(4):
        if number == when:
            for model in pair.both:
                change(model)
            if change is not load:
                pair.renew_optimizers()
        pair.step(number)
    pair.backward(4)
    pair.assert_views()


@on_threads(1)
def test_a_parameter_that_was_replaced_may_be_put_back():
    model = meshard.replicate(IntegerModel())
    optimizer, first = torch.optim.SGD(model.parameters(), lr=1.0), model.shift
    for shift in (nn.Parameter(torch.zeros_like(first)), first):
        model.shift = shift
        model(integer_batch(0, 0)).sum().backward()
    before = first.detach().clone()
    optimizer.step()
    assert not torch.equal(first, before)


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-6], ids=["one bucket", "two"])
@on_threads(1)
def test_parameters_may_be_swapped(bucket_cap_mb):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    meshard.replicate(model, bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    model(torch.ones(1, 2)).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@on_threads(1)
def test_a_replacement_that_is_refused_leaves_the_others_to_the_next_step():
    model = meshard.replicate(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight, bias = model.weight, model.bias
    model.bias = nn.Parameter(torch.zeros(2))
    model(torch.ones(1, 2))
    model.bias, model.weight = bias, nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"'weight' .* was replaced after replicate"):
        model(torch.ones(1, 2))
    model.weight = weight
    model(torch.ones(1, 2)).sum().backward()
    before = bias.detach().clone()
    optimizer.step()
    assert torch.equal(bias, before - 1)


@on_threads(1)
def test_a_replacement_of_another_shape_is_refused():
    model = meshard.replicate(IntegerModel())
    model.shift = nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"'shift' of .* was replaced after replicate"):
        model(integer_batch(0, 0))


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
def test_gradients_of_two_parameters_may_be_exchanged():
    """Each then lies where the other belongs."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    for param in model.parameters():
        param.data = param.data.mul(4).round()
    pair = Pair(model, bucket_cap_mb=25)

    def forward(model, x):
        model(x).sum().backward()

    for number in range(3):
        pair.backward(2 * number, forward, forward)
        for model in pair.both:
            one, two = model[0].weight, model[1].weight
            one.grad, two.grad = two.grad, one.grad
        pair.backward(2 * number + 1, forward, forward)
        pair.compare()
        pair.zero_grad()


@on_threads(2)
def test_parameters_that_share_memory_stay_so():
    def made():
        layers = [nn.Linear(6, 6, bias=False) for _ in range(2)]
        layers[1].weight.data = layers[0].weight.data.t()
        return seeded(nn.Sequential(*layers))

    model, plain = meshard.replicate(made()), made()
    check_training(model, plain)
    assert torch.equal(model[0].weight, model[1].weight.t())


@on_ranks(2)
@pytest.mark.parametrize("are_packed_early", [False, True])
def test_sparse_gradients_become_dense(are_packed_early):
    def forward(m, x):  # the batch chooses the rows
        return m.first(x) + m.table(x[:, 0].long() + 2)  # the gradient of the table comes first

    table, first = nn.Embedding(10, 3, sparse=True), nn.Linear(7, 3, bias=False)
    for layer in (table, first):
        nn.init.ones_(layer.weight)
    with large_from(1 if are_packed_early else 2**60):
        pair = Pair(Made(forward, table=table, first=first), bucket_cap_mb=25)
        pair.plain.table.sparse = False
        for window in range(3):
            with pair.ours.no_sync():
                pair.backward(3 * window)
            for number in (1, 2):  # the second is added to what is there
                pair.backward(3 * window + number)
                pair.compare()
            pair.update()


@on_ranks(2)
@pytest.mark.parametrize("part", ["", "blocks.1"])
@pytest.mark.parametrize(
    ("when", "keep_grads", "cap"),
    [
        (0, True, SMALL),
        (1, False, SMALL),
        (1, True, 25),
        (2, False, SMALL),
        (3, False, 25),
        (3, True, SMALL),
    ],
)
def test_modules_and_their_parts_may_be_cast(part, when, keep_grads, cap):
    def forward(model, x):
        for block in model.blocks:
            x = block(x.to(block.linear.weight.dtype))
        return x.to(model.shift.dtype) + model.shift

    inner = IntegerModel()
    pair = Pair(Made(forward, blocks=[*inner.blocks], shift=inner.shift), bucket_cap_mb=cap)
    for number in range(5):
        if number == when:
            for model in pair.both:
                model.get_submodule(part).double()
        # Gradients that are there are cast too, by torch; so they are others now.
        pair.backward(number)
        pair.compare()
        if not keep_grads:
            pair.update()
    if part == "" and not keep_grads:
        pair.assert_views()


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
def test_a_cast_in_a_window_counts_for_the_sum():
    """Buckets are not made anew while an optimizer in backward has them."""

    def forward(model):
        return (model.cast.weight.double() + model.kept.weight).sum() / 3

    layers = {name: nn.Linear(1, 1, bias=False) for name in ("cast", "kept")}
    model = meshard.replicate(Made(forward, **layers))
    meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.0)
    model.set_is_last_backward(False)
    model().backward()
    model.cast.double()
    model().backward()
    assert model.cast.weight.grad.item() == torch.tensor(1 / 3).item() + 1 / 3


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


@on_threads(2)
def test_buckets_made_anew_have_one_dtype_each():
    def forward(model, x):
        """Use parameters in an order that would fill one bucket more than there are."""
        for index in (4, 6, 3, 1, 5, 7, 0, 2):
            x = x + (model.params[index].float() * x.detach().mean()).sum()
        return x

    dtypes_of = itertools.cycle([torch.float32, torch.bfloat16])
    params = nn.ParameterList(
        torch.ones(numel, dtype=next(dtypes_of)) for numel in (50, 3, 5, 3, 20, 5, 3, 40)
    )
    model = meshard.replicate(Made(forward, params=params), bucket_cap_mb=SMALL)

    for _ in range(3):
        assert sum(bucket_sizes(model).values()) == 129
        assert " + " not in meshard.describe(model)
        model(torch.ones(3)).sum().backward()
        model.zero_grad()


def convolutions():
    """Return a model with kernels whose memory format may change; one of them is packed early."""
    sizes = [(4, 8192), (8192, 5), (5, 8)]
    return seeded(nn.Sequential(*(nn.Conv2d(*each, 3, padding=1, bias=False) for each in sizes)))


def reformat(model, how):
    if how == "data":
        for layer in model:
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    elif how == "module":
        model.to(memory_format=torch.channels_last)
    else:
        model[0].to(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # torch's, of the plain model
@pytest.mark.parametrize("when", ["between steps", "in a window", "with gradients"])
@pytest.mark.parametrize("how", ["data", "module", "module inside"])
@on_threads(1)
def test_the_memory_format_may_change_at_any_time(how, when):
    plain = convolutions()
    model, x = meshard.replicate(copy.deepcopy(plain)), torch.ones(1, 4, 3, 3)
    for step in range(3):
        if when == "in a window":
            with model.no_sync():
                model(x).square().sum().backward()
            plain(x).square().sum().backward()
        if step == 2:
            reformat(model, how)
            reformat(plain, how)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            limit = 1e-4 * theirs.grad.abs().max().item()  # large terms cancel in some elements
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=limit)
        if when != "with gradients":
            model.zero_grad()
            plain.zero_grad()
