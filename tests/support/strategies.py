"""Hypothesis strategies: meshes, shapes, schedules, usage, factors, dtypes."""

import math

import torch
from hypothesis import strategies as st

from meshard import GradientSync

MAX_RANKS = 8
MODES = {  # what a letter of a schedule stands for
    "N": GradientSync.NONE,
    "R": GradientSync.REDUCE_SCATTER,
    "F": GradientSync.FULL,
}

Mesh = tuple[int, ...]  # (shard_count,) or (replicate_count, shard_count)
DivideFactor = float | str | None


def flat_meshes(max_ranks: int = MAX_RANKS) -> st.SearchStrategy[Mesh]:
    """``(n,)`` up to ``max_ranks``."""
    return st.integers(1, max_ranks).map(lambda num_ranks: (num_ranks,))


def hybrid_meshes(max_ranks: int = MAX_RANKS) -> st.SearchStrategy[Mesh]:
    """``(R, S)`` with at most ``max_ranks`` ranks, those with an axis of one included."""
    shapes = [
        (replicas, shards)
        for replicas in range(1, max_ranks + 1)
        for shards in range(1, max_ranks // replicas + 1)
    ]
    shapes.sort(key=lambda shape: (math.prod(shape), shape))  # shrinks to few ranks
    return st.sampled_from(shapes)


def meshes(max_ranks: int = MAX_RANKS) -> st.SearchStrategy[Mesh]:
    """Meshes of one axis or two."""
    return flat_meshes(max_ranks) | hybrid_meshes(max_ranks)


def num_ranks(mesh: Mesh) -> int:
    """Return how many ranks ``mesh`` has."""
    return math.prod(mesh)


def param_shapes(max_rows: int = 13) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 1 to 3 dims; dim 0 may be empty, prime, or smaller than the mesh."""
    rest = st.lists(st.integers(1, 5), max_size=2)
    return st.builds(lambda rows, others: (rows, *others), st.integers(0, max_rows), rest)


def schedules(max_length: int = 6) -> st.SearchStrategy[str]:
    """What each microbatch reduces: N nothing, R the shard group, F all; F comes last."""
    return st.text("NRF", max_size=max_length - 1).map(lambda start: start + "F")


def usage_masks(
    *, num_microbatches: int, num_params: int, num_ranks: int = 1
) -> st.SearchStrategy[tuple[tuple[tuple[bool, ...], ...], ...]]:
    """``mask[microbatch][rank][param]``: does this rank use this parameter then?"""
    per_param = st.tuples(*[st.booleans()] * num_params)
    per_rank = st.tuples(*[per_param] * num_ranks)
    return st.tuples(*[per_rank] * num_microbatches)


def divide_factors() -> st.SearchStrategy[DivideFactor]:
    """None, ``"D"`` (all ranks), ``"S"`` (shard ranks) or a number; see ``as_number``."""
    named: list[DivideFactor] = [None, "D", "S", 1.0, 3.0, 0.5, 300.0]
    return st.sampled_from(named) | st.integers(-4, 8).map(lambda power: 2.0**power)


def dyadic_divide_factors() -> st.SearchStrategy[float]:
    """Powers of two: dividing by them is exact."""
    return st.integers(-4, 8).map(lambda power: 2.0**power)


def as_number(factor: DivideFactor, mesh: Mesh) -> float:
    """Return the number that ``factor`` stands for on ``mesh``."""
    if factor is None or factor == "D":
        return float(num_ranks(mesh))
    return float(mesh[-1]) if factor == "S" else float(factor)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """The dtypes that parameters and gradients may have."""
    return st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
