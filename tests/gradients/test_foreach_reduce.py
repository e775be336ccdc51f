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
from tests.support.threads import run_threads

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


def reduce_window(mesh_shape, shapes, gradients, **options):
    """Reduce all but the last microbatch to a partial; return the result of this rank."""
    shard_group, replicate_group = groups_of(mesh_shape)
    partial = None
    for number, of_ranks in enumerate(gradients):
        partial = foreach_reduce(
            of_ranks[dist.get_rank()],
            shard_group,
            replicate_group,
            shapes=shapes,
            partial=partial,
            all_reduce=number == len(gradients) - 1,
            **options,
        )
    return partial


def shard_of(tensor, count, rank):
    chunks = tensor.chunk(count) if tensor.shape[0] else ()
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def exact_shards(mesh_shape, shapes, gradients, factor, rank):
    """Return the exact value of each element of each shard of a rank, and the sum of magnitudes."""
    count = mesh_shape[-1]
    divisor = Fraction(math.prod(mesh_shape) if factor is None else factor)
    for index, shape in enumerate(shapes):
        used = [g[index] for ranks in gradients for g in ranks if g[index] is not None]
        if not used and math.prod(shape):
            yield None
            continue
        zero = torch.zeros(shape)
        total, magnitude = sum(used, zero), sum((each.abs() for each in used), zero)
        own = shard_of(total, count, rank % count)
        bound = magnitude.max().item() if magnitude.numel() else 0.0
        yield own.shape, [Fraction(value) / divisor for value in own.flatten().tolist()], bound


@settings(deadline=None, max_examples=60)
@given(
    window=windows(),
    factor=st.sampled_from([None, 0.5, 1.0, 4.0, 3.0, 0.3, 300.0]),
    wire=st.sampled_from(DTYPES),
)
def test_the_result_is_the_exact_sum_over_the_divide_factor(window, factor, wire):
    mesh_shape, shapes, gradients = window
    results = run_threads(
        reduce_window,
        math.prod(mesh_shape),
        *window,
        divide_factor=factor,
        reduce_dtype=wire,
    )
    divisor = Fraction(math.prod(mesh_shape) if factor is None else factor)
    is_dyadic = divisor.numerator.bit_count() == divisor.denominator.bit_count() == 1
    eps = 0.0 if is_dyadic else torch.finfo(wire).eps
    for rank, result in enumerate(results):
        expected = exact_shards(mesh_shape, shapes, gradients, factor, rank)
        for ours, theirs in zip(result, expected, strict=True):
            if theirs is None or ours is None:
                assert ours is theirs
                continue
            shape, values, bound = theirs
            assert ours.shape == shape
            assert ours.dtype is torch.float32
            tolerance = (len(gradients) + 4) * eps * bound / float(divisor)
            for value, exact in zip(ours.flatten().tolist(), values, strict=True):
                assert abs(Fraction(value) - exact) <= tolerance


def averages(shard_ranks, replica_ranks):
    """Reduce the number of the rank, then zero, as in the worked example of the documentation."""
    shard_group, _ = dist.new_subgroups_by_enumeration(shard_ranks)
    replicate_group, _ = dist.new_subgroups_by_enumeration(replica_ranks)
    first, then = torch.full((3, 2), float(dist.get_rank())), torch.zeros(3, 2)
    partial = foreach_reduce([first], shard_group, replicate_group, all_reduce=False)
    (result,) = foreach_reduce([then], shard_group, replicate_group, partial=partial)
    assert (first == dist.get_rank()).all() and not then.any()  # the arguments are unchanged
    return partial[0].tolist(), result.tolist()


def test_plain_process_groups_are_enough(run_ranks):
    results = run_ranks(averages, 4, [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    for rank, (partial, result) in enumerate(results):
        num_rows = 2 if rank % 2 == 0 else 1  # as torch.chunk cuts three rows
        assert partial == [[0.5 if rank < 2 else 2.5] * 2] * num_rows
        assert result == [[1.5] * 2] * num_rows


def large_values():
    (shard,) = foreach_reduce(
        [torch.full((4,), 20_000.0)], dist.group.WORLD, reduce_dtype=torch.float16
    )
    return shard.tolist()


def test_float16_averages_what_would_overflow_as_a_sum():
    assert run_threads(large_values, 4) == [[20_000.0]] * 4


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
    rows = comm.send_rows(layout.shard_numel, dtype, device=cpu, group=shard_group)
    layout.reduce_scatter_copy_in(rows, [torch.full((4, 3), float(dist.get_rank()))])
    # Where there are several blocks, that of this rank is not sent: the sum is written there.
    others = rows if len(rows) == 1 else [rows[1 - shard_group.rank()]]
    sent = [weakref.ref(row) for row in others]
    del others
    reduction = Reduction(plan, rows, layout.marks_for(frozenset({0})), None, comm)
    del rows
    assert not are_freed(sent, seconds=0)
    reduction.advance()
    assert are_freed(sent)
    assert torch.equal(reduction.finish().shard, torch.full((6,), 1.5))
