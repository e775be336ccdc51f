"""The reduction of one unit as a function of tensors and process groups."""

import math
import time
import weakref
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from meshard._comm.gradient_buffer import GradientLayout
from meshard._communicators import make_communicator
from meshard._mesh.layout import ParamLayout
from meshard.foreach_reduce import ReducePlan, Reduction, foreach_reduce
from tests.support.ranks import on_ranks, on_threads

MESHES = [(1,), (2,), (1, 2), (2, 1), (2, 2)]  # (replicas, shards), or shards alone
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def groups_of(mesh_shape):
    """Return this rank's shard group and replicate group."""
    mesh = init_device_mesh("cpu", mesh_shape)
    if len(mesh_shape) == 1:
        return mesh.get_group(0), None
    return mesh.get_group(1), mesh.get_group(0)


@st.composite
def windows(draw):
    """Draw the gradients of every microbatch, rank and parameter: small integers, or None."""
    mesh_shape = draw(st.sampled_from(MESHES))
    shape = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
    shapes = draw(st.lists(shape, min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def gradient(shape):
        if not draw(st.booleans()):
            return None
        return torch.randint(-8, 9, shape, generator=generator).float()

    num_microbatches = draw(st.integers(1, 3))
    gradients = [
        [[gradient(shape) for shape in shapes] for _ in range(math.prod(mesh_shape))]
        for _ in range(num_microbatches)
    ]
    return mesh_shape, shapes, gradients


def exact_shard(tensor, count, rank):
    """Return the exact value of each element that a rank owns, in its shape."""
    chunks = tensor.chunk(count) if tensor.shape[0] else ()
    own = chunks[rank] if rank < len(chunks) else tensor[:0]
    return own.shape, [Fraction(value) for value in own.flatten().tolist()]


@settings(deadline=None, max_examples=60)
@given(
    window=windows(),
    factor=st.sampled_from([None, 0.5, 1.0, 4.0, 3.0, 0.3, 300.0]),
    wire=st.sampled_from(DTYPES),
)
def test_the_result_is_the_exact_sum_over_the_divide_factor(window, factor, wire):
    """All microbatches but the last are reduced to a partial."""
    mesh_shape, shapes, gradients = window
    divisor = Fraction(math.prod(mesh_shape) if factor is None else factor)
    is_dyadic = divisor.numerator.bit_count() == divisor.denominator.bit_count() == 1
    eps = 0.0 if is_dyadic else torch.finfo(wire).eps

    @on_threads(math.prod(mesh_shape))
    def on_each_rank():
        groups, rank, result = groups_of(mesh_shape), dist.get_rank(), None
        for number, of_ranks in enumerate(gradients):
            result = foreach_reduce(
                of_ranks[rank],
                *groups,
                shapes=shapes,
                partial=result,
                all_reduce=number == len(gradients) - 1,
                divide_factor=factor,
                reduce_dtype=wire,
            )
        for index, (ours, shape) in enumerate(zip(result, shapes, strict=True)):
            used = [g[index] for ranks in gradients for g in ranks if g[index] is not None]
            assert (ours is None) == (not used)
            if ours is None:
                continue
            zero = torch.zeros(shape)
            total, magnitude = sum(used, zero), sum(map(torch.abs, used), zero)
            own_shape, values = exact_shard(total, mesh_shape[-1], rank % mesh_shape[-1])
            assert ours.shape == own_shape and ours.dtype is torch.float32
            bound = magnitude.max().item() if magnitude.numel() else 0.0
            tolerance = (len(gradients) + 4) * eps * bound / float(divisor)
            for value, exact in zip(ours.flatten().tolist(), values, strict=True):
                assert abs(Fraction(value) - exact / divisor) <= tolerance

    on_each_rank()


@on_ranks(4)
def test_plain_process_groups_are_enough():
    """Reduce the number of the rank, then zero, as in the worked example of the documentation."""
    rank = dist.get_rank()
    shard_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    replicate_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    first, then = torch.full((3, 2), float(rank)), torch.zeros(3, 2)
    (partial,) = foreach_reduce([first], shard_group, replicate_group, all_reduce=False)
    (result,) = foreach_reduce([then], shard_group, replicate_group, partial=[partial])
    assert (first == rank).all() and not then.any()  # the arguments are unchanged
    num_rows = 2 if rank % 2 == 0 else 1  # as torch.chunk cuts three rows
    assert partial.tolist() == [[0.5 if rank < 2 else 2.5] * 2] * num_rows
    assert result.tolist() == [[1.5] * 2] * num_rows


@on_threads(1)
def test_wrong_arguments_are_refused_before_any_collective():
    group, ones = dist.group.WORLD, torch.ones(2)
    wrong = [
        (([None], group), {}, ValueError, "gradient 0 is None: pass shapes"),
        (([ones], group), {"shapes": []}, ValueError, "got 1 gradients and 0 shapes"),
        (([ones], group), {"shapes": [(3,)]}, ValueError, r"shape \(2,\), but shapes says \(3,\)"),
        (([torch.ones(())], group), {}, ValueError, "gradient 0 has no dims"),
        (([ones], group), {"divide_factor": 0.0}, ValueError, "positive and finite, got 0.0"),
        (([ones], group), {"divide_factor": math.nan}, ValueError, "positive and finite"),
        (([ones], group), {"partial": []}, ValueError, "partial has 0 entries for 1 gradients"),
        (
            ([ones], group),
            {"partial": [torch.ones(3)]},
            ValueError,
            r"this rank's shard has \(2,\)",
        ),
        (([ones.int()], group), {}, TypeError, "floating-point dtypes, got torch.int32"),
        (([ones], group), {"reduce_dtype": torch.int8}, TypeError, "got torch.int8"),
    ]
    for args, kwargs, error, text in wrong:
        with pytest.raises(error, match=text):
            foreach_reduce(*args, **kwargs)
    assert foreach_reduce([], group) == []
    with torch.device("meta"):  # where this rank has no gradient to tell the device
        assert foreach_reduce([None], group, shapes=[(2,)], device=torch.device("cpu")) == [None]


def are_freed(refs, seconds=5.0):
    """Whether all tensors are freed, once gloo's threads have dropped the works that are over."""
    until = time.monotonic() + seconds
    while any(ref() is not None for ref in refs) and time.monotonic() < until:
        time.sleep(0.01)
    return all(ref() is None for ref in refs)


@pytest.mark.parametrize("share_memory", [False, True])
@on_ranks(4)
def test_what_the_shard_group_has_received_is_freed_while_the_all_reduce_runs(share_memory):
    shard_group, replicate_group = groups_of((2, 2))
    cpu, dtype = torch.device("cpu"), torch.float32
    layout = GradientLayout([ParamLayout(torch.Size([4, 3]), 0, 2)], (0,), cpu)
    plan = ReducePlan(
        wire_dtype=dtype,
        accumulate_dtype=dtype,
        shard_group=shard_group,
        replicate_group=replicate_group,
        replicate_count=2,
        divide_factor=None,
        label="unit",
    )
    comm = make_communicator(cpu, share_memory=share_memory)
    rows = comm.send_memory(layout.row_numel, dtype, device=cpu, group=shard_group)
    layout.reduce_scatter_copy_in(rows, [torch.full((4, 3), float(dist.get_rank()))], {0})
    sent = [weakref.ref(rows)]
    reduction = Reduction(plan, layout, rows, None, comm)
    del rows
    assert not are_freed(sent, seconds=0)
    reduction.advance()
    assert are_freed(sent)
    assert torch.equal(reduction.finish()[:6], torch.full((6,), 1.5))
