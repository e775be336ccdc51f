"""Use ``spread`` for several axes without their product, ``slow`` for rows of the slow tier."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def spread(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with rows in which every value of every axis occurs.

    There are as many rows as the longest axis has values. The shorter axes are repeated, each
    shifted by its own step, so that equally long ones do not keep the same pairs. Use it where a
    behaviour must hold for each value, and not for each combination; combinations are drawn by
    Hypothesis. An axis of several names has tuples: ``spread(**{"a, b": [(1, 2)], "c": [3]})``.

    >>> spread(dtype=["bf16", "fp32"], size=[1, 2, 3]).args[1]
    [('bf16', 1), ('fp32', 2), ('bf16', 3)]
    """
    assert len(axes) > 1, "of one axis, pytest.mark.parametrize has all values"
    length = max(len(values) for values in axes.values())
    columns = [
        values if "," in names else [(value,) for value in values] for names, values in axes.items()
    ]
    rows = []
    for row in range(length):
        places = [row + step * (row // len(column)) for step, column in enumerate(columns)]
        values = [column[at % len(column)] for at, column in zip(places, columns, strict=True)]
        rows.append(tuple(itertools.chain(*values)))
    return pytest.mark.parametrize(", ".join(axes), rows)


def slow(*row: Any) -> Any:
    """Return a row for ``parametrize`` that is in the slow tier."""
    return pytest.param(*row, marks=pytest.mark.slow)


def unmended(reason: str, *row: Any) -> Any:
    """Return a row for ``parametrize`` that must fail until its fault is mended."""
    return pytest.param(*row, marks=pytest.mark.xfail(strict=True, reason=reason))


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return ``values`` for ``parametrize``, of which only ``fast`` are in the default tier.

    A tuple is a row of a test with several arguments.
    """
    return [
        each if each in fast else slow(*each) if isinstance(each, tuple) else slow(each)
        for each in values
    ]
