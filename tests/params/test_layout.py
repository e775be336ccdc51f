"""Layouts: every element has one owner, and one position on the wire."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard._comm.all_gather import GatherPlan
from meshard._comm.cpu import WorkCommunicator
from meshard._mesh.layout import FlatLayout, ParamLayout, matching_parts
from meshard._params.flat_params import FlatShard
from meshard._params.unit_params import MemoryLocation

CPU = torch.device("cpu")
shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3)


@st.composite
def layouts(draw):
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    return ParamLayout(torch.Size(shape), dim, draw(st.integers(1, 8)))


@given(layout=layouts())
def test_shards_tile_the_rows_exactly_once(layout):
    rows = [row for rank in range(layout.shard_count) for row in layout.owned_rows(rank)]
    assert rows == list(range(layout.rows))


@given(layout=layouts())
def test_shards_are_those_of_torch_chunk(layout):
    whole = torch.arange(layout.numel).view(layout.shape)
    chunks = torch.chunk(whole, layout.shard_count, dim=layout.shard_dim)
    for rank, chunk in enumerate(chunks):
        assert layout.local_shape(rank) == chunk.shape
    for rank in range(len(chunks), layout.shard_count):
        assert layout.local_shape(rank)[layout.shard_dim] == 0


def test_a_rank_outside_the_axis_is_refused():
    with pytest.raises(ValueError, match=r"shard_rank must be in \[0, 2\), got 2"):
        ParamLayout(torch.Size([3]), 0, 2).owned_rows(2)


def shards_of(whole, params, rank):
    return [
        tensor.narrow(p.shard_dim, p.owned_rows(rank).start, len(p.owned_rows(rank)))
        for tensor, p in zip(whole, params, strict=True)
    ]


ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a group of one rank


@given(data=st.data(), count=st.integers(1, 6), num_params=st.integers(1, 5))
def test_gather_restores_every_parameter_and_never_reads_padding(data, count, num_params):
    params, dtypes = [], []
    for _ in range(num_params):
        shape = data.draw(shapes)
        dim = data.draw(st.integers(0, len(shape) - 1))
        params.append(ParamLayout(torch.Size(shape), dim, count))
        dtypes.append(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8])))
    param_dtype = data.draw(st.sampled_from([None, torch.float64, torch.bfloat16]))
    whole = [
        torch.randint(-9, 9, p.shape).to(dtype) for p, dtype in zip(params, dtypes, strict=True)
    ]
    layout = FlatLayout.build(params, dtypes)
    compute = [param_dtype if param_dtype and d.is_floating_point else d for d in dtypes]
    targets = [torch.full(p.shape, 5).to(dtype) for p, dtype in zip(params, compute, strict=True)]
    plan = GatherPlan(layout, FlatLayout.build(params, compute, layout.order), targets)
    rows = []
    for rank in range(count):
        storage = FlatShard(layout, rank, MemoryLocation(CPU))
        for segment in storage.segments:  # poison what fill must overwrite or gather must skip
            segment.fill_(float("nan") if segment.is_floating_point() else 77)
        for own, shard in zip(storage.locals, shards_of(whole, params, rank), strict=True):
            own.copy_(shard)
        started = plan.start(
            storage.buffer, storage.segments, comm=WorkCommunicator(), group=ALONE, label="unit"
        )
        rows.append(started.result.view(-1))
    for target in targets:
        target.fill_(5)
    plan.copy_out(torch.stack(rows))
    for target, original in zip(targets, whole, strict=True):
        assert torch.equal(target, original.to(target.dtype))


@given(layout=layouts())
def test_slots_and_whole_name_the_same_elements(layout):
    whole = torch.arange(layout.numel, dtype=torch.float32).view(layout.shape)
    ranges = torch.full((layout.shard_count, layout.range_numel), -1.0)
    for ours, theirs in matching_parts(ranges, whole, layout):
        ours.copy_(theirs)
    for rank in range(layout.shard_count):
        own = shards_of([whole], [layout], rank)[0].reshape(-1)
        assert torch.equal(ranges[rank, : own.numel()], own)
        assert (ranges[rank, own.numel() :] == -1).all()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.int8]


@given(
    sizes=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 9)), min_size=1, max_size=6)
)
def test_segments_are_aligned_to_their_dtype(sizes):
    params = [ParamLayout(torch.Size([numel]), 0, 2) for _, numel in sizes]
    layout = FlatLayout.build(params, [dtype for dtype, _ in sizes])
    numel, dtype = layout.shard_form
    buffer = torch.empty(2, numel, dtype=dtype)
    for segment, view in zip(layout.segments, layout.split(buffer), strict=True):
        assert segment.byte_offset % segment.dtype.itemsize == 0
        assert view.dtype == segment.dtype
        assert view.shape == (2, segment.numel)
