"""Gradients, and their absence, in the buffer that is reduced."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard._comm.cpu import sum_rows
from meshard._comm.gradient_buffer import GradientLayout
from meshard._mesh.layout import ParamLayout

CPU = torch.device("cpu")


@st.composite
def units(draw):
    torch.manual_seed(draw(st.integers(0, 99)))  # of ``integers``, so that examples can be replayed
    count = draw(st.integers(1, 6))
    params = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        params.append(ParamLayout(torch.Size(shape), dim, count))
    return params


def integers(shape):
    # -0.0 is a value like any other, and not the absence of a gradient.
    return torch.randint(-2, 3, shape) * torch.tensor(-1.0)


def used_in(gradients):
    return frozenset(i for i, gradient in enumerate(gradients) if gradient is not None)


@given(params=units(), data=st.data())
def test_ranks_that_use_different_parameters_reduce_to_the_right_sums(params, data):
    count = params[0].shard_count
    layout = GradientLayout(params, tuple(range(len(params))), CPU)
    used_by = [
        frozenset(data.draw(st.sets(st.sampled_from(range(len(params)))))) for _ in range(count)
    ]
    gradients = [
        [integers(p.shape) if i in used_by[rank] else None for i, p in enumerate(params)]
        for rank in range(count)
    ]
    buffers = []
    for rank in range(count):
        buffer = layout.allocate(torch.float32).fill_(float("nan"))
        layout.reduce_scatter_copy_in(buffer, gradients[rank], used_by[rank])
        buffers.append(buffer)
    anyone = frozenset().union(*used_by)
    for rank in range(count):
        flat = torch.empty(layout.row_numel)
        sum_rows(flat, torch.stack([*(buffer[rank] for buffer in buffers), torch.zeros_like(flat)]))
        assert layout.used_anywhere(flat, used_by[rank]) == anyone
        shards = dict(layout.shards(flat, rank, anyone))
        for index in anyone:
            total = sum(g[index] for g in gradients if g[index] is not None)
            dim, rows = params[index].shard_dim, params[index].owned_rows(rank)
            assert torch.equal(shards[index], total.narrow(dim, rows.start, len(rows)))
        assert not flat.isnan().any()


@given(params=units(), data=st.data())
def test_adding_equals_packing_the_sum(params, data):
    layout = GradientLayout(params, tuple(range(len(params))), CPU)
    masks = [
        data.draw(st.lists(st.booleans(), min_size=len(params), max_size=len(params)))
        for _ in range(3)
    ]
    batches = [
        [integers(p.shape) if use else None for use, p in zip(mask, params, strict=True)]
        for mask in masks
    ]
    buffer, used = layout.allocate(torch.float32), used_in(batches[0])
    layout.reduce_scatter_copy_in(buffer, list(batches[0]), used)
    for batch in batches[1:]:
        used |= used_in(batch)
        layout.add(buffer, list(batch), used)
    present = [
        [gradient for gradient in column if gradient is not None]
        for column in zip(*batches, strict=True)
    ]
    sums = [sum(each) if each else None for each in present]
    expected = layout.allocate(torch.float32)
    layout.reduce_scatter_copy_in(expected, sums, used_in(sums))
    assert torch.equal(buffer, expected)


@given(params=units(), data=st.data())
def test_packing_at_once_gives_the_same_bits(params, data):
    params += [ParamLayout(torch.Size([0, 2]), 0, params[0].shard_count)] * data.draw(
        st.integers(0, 1)
    )
    del params[: data.draw(st.integers(0, len(params) - 1))]
    everything = tuple(range(len(params)))
    gradients = [integers(p.shape) if data.draw(st.booleans()) else None for p in params]
    one_by_one, at_once = (
        GradientLayout(params, everything, CPU, at_once=at_once) for at_once in (False, True)
    )
    expected, buffer = (one_by_one.allocate(torch.float32).fill_(math.nan) for _ in range(2))
    one_by_one.reduce_scatter_copy_in(expected, list(gradients), used_in(gradients))
    at_once.reduce_scatter_copy_in(buffer, list(gradients), used_in(gradients))
    assert torch.equal(buffer.view(torch.int32), expected.view(torch.int32))


def test_gradients_of_a_large_unit_are_freed_as_they_are_added():
    layout = GradientLayout((ParamLayout(torch.Size((512, 512)), 0, 2),), (0,), CPU)
    assert layout.is_large
    buffer = layout.allocate(torch.float32)
    layout.reduce_scatter_copy_in(buffer, [integers((512, 512))], {0})
    gradients = [integers((512, 512))]
    layout.add(buffer, gradients, {0})
    assert gradients == [None]


@given(params=units(), data=st.data())
def test_moving_to_another_layout_keeps_values_under_their_parameter(params, data):
    everything = range(len(params))
    before = tuple(sorted(data.draw(st.sets(st.sampled_from(everything), min_size=1))))
    after = tuple(sorted({*before, *data.draw(st.sets(st.sampled_from(everything)))}))
    old, new = GradientLayout(params, before, CPU), GradientLayout(params, after, CPU)
    gradients = [integers(p.shape) if i in before else None for i, p in enumerate(params)]
    buffer = old.allocate(torch.float32)
    old.reduce_scatter_copy_in(buffer, gradients, set(before))
    expected = new.allocate(torch.float32)
    new.reduce_scatter_copy_in(expected, gradients, set(before))
    assert torch.equal(old.move(buffer, new, frozenset(before)), expected)


@given(params=units(), data=st.data())
def test_what_is_erased_leaves_neither_values_nor_counts(params, data):
    everything = frozenset(range(len(params)))
    layout = GradientLayout(params, tuple(everything), CPU)
    gradients = [integers(p.shape) for p in params]
    gone = data.draw(st.sets(st.sampled_from(sorted(everything))))
    buffer, expected = layout.allocate(torch.float32), layout.allocate(torch.float32)
    layout.reduce_scatter_copy_in(buffer, list(gradients), everything)
    layout.erase(buffer, gone)
    rest = [None if index in gone else each for index, each in enumerate(gradients)]
    layout.reduce_scatter_copy_in(expected, rest, everything - gone)
    assert torch.equal(buffer, expected)


FEW_SHAPES = {  # with the dim that is cut, in which the size is that of the shard group
    "one element": [((-1,), 0), ((1, -1), 1), ((-1, 1, 1), 0)],
    "one element along 0": [((-1,), 0)],
    "two elements": [((-1, 2), 0), ((1, -1, 2), 1)],
}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [[FP32], [BF16], [BF16, FP32]], ids=str)
@pytest.mark.parametrize(
    ("count", "num_params", "kind"),
    [
        (1, 3, "one element"),
        (2, 3, "one element"),
        (5, 3, "one element"),
        (8, 3, "one element along 0"),
        (2048, 3, "one element along 0"),
        (512, 20, "one element along 0"),
        (4, 3, "two elements"),
    ],
)
def test_a_rank_may_own_few_elements_of_each(count, num_params, kind, dtypes):
    gradients, params = [], []
    for index in range(num_params):
        shape, dim = FEW_SHAPES[kind][index % len(FEW_SHAPES[kind])]
        values = torch.randn(count * abs(math.prod(shape))).view(shape)
        gradients.append(values.to(dtypes[index % len(dtypes)]))
        params.append(ParamLayout(values.shape, dim, count))
    layout = GradientLayout(params, tuple(range(num_params)), CPU)
    for dtype in (FP32, BF16):
        buffer = layout.allocate(dtype).fill_(float("nan"))
        layout.reduce_scatter_copy_in(buffer, list(gradients), set(range(num_params)))
        for index, (gradient, param) in enumerate(zip(gradients, params, strict=True)):
            owned = torch.stack(gradient.to(dtype).chunk(count, param.shard_dim))
            assert torch.equal(layout.range_of(buffer, index), owned.flatten(1))
