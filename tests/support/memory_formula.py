"""Use ``peaks`` to predict the peak memory of a step: the formula of docs/explanation/memory.md.

For units that compute one after the other inside a root, in one dtype, on a CPU mesh of one axis
that sends through sockets, under ``GradientSync.FULL``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the peak depends on; in bytes, but for counts.

    Attributes:
        units: ``w``: the whole parameters of each unit, in the order of forward.
        largest: ``g``: the largest parameter of each.
        activations: ``a``: what the plain model saves for backward in each.
        root: ``r``: the whole parameters of the root.
        shards: ``S``: ranks.
        reshards: Whether units reshard after forward.
        state: ``k``: optimizer state, in copies of the parameters.
        scratch: ``t``: what the optimizer takes for the time of its step, likewise.
    """

    units: Sequence[int]
    largest: Sequence[int]
    activations: Sequence[int]
    root: int
    shards: int
    reshards: bool
    state: float = 2.0
    scratch: float = 1.0


class Peaks(NamedTuple):
    """The peak of each part of a step; that of the step is the largest."""

    forward: float
    backward: float
    optimizer: float


def peaks(sizes: Sizes) -> Peaks:
    """Return the peak of each part of a step.

    >>> sizes = Sizes(
    ...     units=[4, 4, 4], largest=[1, 1, 1], activations=[0, 0, 0],
    ...     root=2, shards=2, reshards=True,
    ... )
    >>> peaks(sizes)
    Peaks(forward=35.0, backward=43.0, optimizer=35.0)
    """
    whole, root = list(sizes.units), sizes.root
    shards = (sum(whole) + root) / sizes.shards
    forward = backward = 0.0
    for u, own in enumerate(whole):
        before, after = sum(whole[u - 1 : u] if u else []), sum(whole[u + 1 : u + 2])
        saved = sum(sizes.activations[: u + 1])
        present = own if sizes.reshards else sum(whole[: u + 1])
        # gloo gathers into memory of its own and copies that: 2. Then the unit is copied out.
        forward = max(forward, root + present + max(own, 2 * after) + saved)
        arrives = before if sizes.reshards else 0
        # Two ranks receive where the sum will be, more ranks beside what they send.
        sent = after if sizes.shards == 2 else 2 * after
        moments = (
            2 * arrives + sent,
            arrives + sent + sizes.largest[u],  # the first gradient, with which what was sent goes
            arrives + own + sizes.largest[u],  # all gradients, packed one by one
        )
        reduced = sum(whole[u + 1 :]) / sizes.shards
        backward = max(backward, 2 * root + present + max(moments) + reduced + saved)
    at_rest = shards * (1 + sizes.state)
    return Peaks(at_rest + forward, at_rest + backward, at_rest + shards * (1 + sizes.scratch))
