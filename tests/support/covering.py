"""Which rows of a product are enough for every pair of values to meet, and when do others run?"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every_pair(rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return places of rows in which any two values occur together that do so in ``rows``.

    The same places every time: the row that has most new pairs comes next, of several the first.
    A single column is taken whole.

    >>> rows = list(itertools.product("ab", [1, 2], [True, False]))
    >>> [rows[place] for place in every_pair(rows)]
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    columns = [_numbered(column) for column in zip(*rows, strict=True)]
    pairs = [_pairs(row) for row in zip(*columns, strict=True)]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(pairs)), key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def covering(
    names: str | Sequence[str], rows: Iterable[Any], *, ids: Any = None
) -> pytest.MarkDecorator:
    """Parametrize a test like pytest does; rows that show no new pair are for ``-m exhaustive``.

    Args:
        names: Of the parameters, as pytest takes them; at least two.
        rows: The product, or what is left of it where not all values go together.
        ids: As pytest takes them.
    """
    rows = list(rows)
    enough = set(every_pair(rows))
    marked = [
        pytest.param(*row, marks=[] if place in enough else [pytest.mark.exhaustive])
        for place, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, marked, ids=ids)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``exhaustive`` unless ``-m`` names that marker."""
    if "exhaustive" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def _numbered(column: Iterable[Any]) -> list[int]:
    """Number values by equality, as not all have a hash; ``True`` is not 1."""
    seen: list[tuple[type, Any]] = []
    numbers = []
    for value in column:
        if (type(value), value) not in seen:
            seen.append((type(value), value))
        numbers.append(seen.index((type(value), value)))
    return numbers


def _pairs(row: tuple[int, ...]) -> set[tuple[Any, ...]]:
    columns = list(enumerate(row))
    return set(itertools.combinations(columns, 2)) or set(columns)
