"""``spread``: parametrize a test over several axes without their product."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def spread(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with rows in which every value of every axis occurs.

    There are as many rows as the longest axis has values; the shorter ones are repeated. Use it
    where a behaviour must hold for each value, and not for each combination; combinations are drawn
    by Hypothesis.

    >>> spread(dtype=["bf16", "fp32"], size=[1, 2, 3]).args[1]
    [('bf16', 1), ('fp32', 2), ('bf16', 3)]
    """
    length = max(len(values) for values in axes.values())
    repeated = [itertools.islice(itertools.cycle(values), length) for values in axes.values()]
    return pytest.mark.parametrize(", ".join(axes), list(zip(*repeated, strict=True)))
