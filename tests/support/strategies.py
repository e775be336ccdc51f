"""Use these for what several properties draw, and ``MODES`` for schedules of microbatches."""

import math

import torch
from hypothesis import strategies as st

from meshard import GradientSync

MODES = {  # what a letter of a schedule stands for
    "N": GradientSync.NONE,
    "R": GradientSync.REDUCE_SCATTER,
    "F": GradientSync.FULL,
}
MAX_RANKS = 8


def meshes() -> st.SearchStrategy[tuple[int, ...]]:
    """``(S,)``, ``(R, S)``, and ``(R, S)`` with an axis of one, one as often as the other."""
    ranks = range(1, MAX_RANKS + 1)
    hybrid = [(r, s) for r in ranks for s in ranks if r * s <= MAX_RANKS]
    hybrid.sort(key=lambda shape: (math.prod(shape), shape))  # shrinks to few ranks
    kinds = [(s,) for s in ranks], [m for m in hybrid if 1 in m], [m for m in hybrid if 1 not in m]
    return st.one_of(st.sampled_from(kind) for kind in kinds)


def param_shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 1 to 3 dims; dim 0 may be empty, prime, or smaller than the mesh."""
    rest = st.lists(st.integers(1, 5), max_size=2)
    return st.builds(lambda rows, others: (rows, *others), st.integers(0, 13), rest)


def schedules(max_length: int) -> st.SearchStrategy[str]:
    """What each microbatch reduces: N nothing, R the shard group, F all; F comes last."""
    return st.text("NRF", max_size=max_length - 1).map(lambda start: start + "F")


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """The dtypes that parameters and gradients may have, float32 most often."""
    others = [torch.float64, torch.bfloat16, torch.float16]
    return st.just(torch.float32) | st.sampled_from([torch.float32, *others])
