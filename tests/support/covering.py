"""Which rows of a product are enough for every pair of values to meet, and when do others run?"""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

TRIES = 10


def every_pair(rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return places of rows in which any two values occur together that do so in ``rows``.

    The row that has most new pairs comes next, of several any; the shortest of some tries is taken,
    the same every time. A single column is taken whole.

    >>> rows = list(itertools.product("ab", [1, 2], [True, False]))
    >>> len(every_pair(rows))
    4
    """
    columns = [_numbered(column) for column in zip(*rows, strict=True)]
    pairs = [_pairs(row) for row in zip(*columns, strict=True)]
    return min((_greedy(pairs, random.Random(number)) for number in range(TRIES)), key=len)


def _greedy(pairs: Sequence[set[Any]], order: random.Random) -> list[int]:
    places = order.sample(range(len(pairs)), len(pairs))
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(places, key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def covering(
    names: str, rows: Iterable[tuple[Any, ...]], *, indirect: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Parametrize a test like pytest does; rows that show no new pair are for ``-m exhaustive``.

    Args:
        names: Of the parameters, as pytest takes them; at least two.
        rows: The product, or what is left of it where not all values go together.
        indirect: Which of the names are fixtures, as pytest takes them.
    """
    rows = list(rows)
    enough = set(every_pair(rows))
    marked = [
        pytest.param(*row, marks=[] if place in enough else [pytest.mark.exhaustive])
        for place, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, marked, ids=_named, indirect=indirect)


def _named(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return ",".join(str(getattr(part, "__name__", part)) for part in parts)


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
