"""Selection of rows: which combinations of parametrized values run in which tier.

A test that is parametrized over a product of axes has more rows than a developer can wait for. By
default those rows run in which every value occurs once; with ``-m slow`` the other rows; where the
product is written with ``covering``, ``-m slow`` stops at the rows in which every pair of values
occurs, and ``-m exhaustive`` runs what is left. A ``-m`` that names neither tier selects from the
default one.
"""

import itertools
import operator
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

TRIES = 10


def every_pair(rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return indices of rows in which any two values occur together that do so in ``rows``.

    The row that has most new pairs comes next, of several any; the shortest of some tries is taken,
    the same every time. A single column is taken whole.

    >>> rows = list(itertools.product("ab", [1, 2], [True, False]))
    >>> len(every_pair(rows))
    4
    """
    return _shortest([_pairs(row) for row in _numbered_rows(rows)])


def every_value(rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return indices of rows in which every value of each column occurs.

    >>> rows = list(itertools.product("abc", [1, 2], [True, False]))
    >>> len(every_value(rows))
    3
    """
    return _shortest([set(enumerate(row)) for row in _numbered_rows(rows)])


def covering(
    names: str, rows: Iterable[tuple[Any, ...]], *, indirect: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Parametrize a test as pytest does, with rows that are spread over the tiers.

    Rows in which every value occurs run by default, rows that are needed to have every pair of
    values with ``-m slow``, and the others with ``-m exhaustive``.

    Args:
        names: Of the parameters, as pytest takes them; at least two.
        rows: The product, or what is left of it where not all values go together.
        indirect: Which of the names are fixtures, as pytest takes them.
    """
    rows = list(rows)
    pairs = every_pair(rows)
    values = {pairs[index] for index in every_value([rows[index] for index in pairs])}
    marks = {index: [] if index in values else [pytest.mark.slow] for index in pairs}
    marked = [
        pytest.param(*row, marks=marks.get(index, [pytest.mark.exhaustive]))
        for index, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, marked, ids=_name_of, indirect=indirect)


def mark_products(items: Sequence[pytest.Item]) -> None:
    """Mark ``slow`` the rows of each test that the default tier does not need.

    Of a test with ``@pytest.mark.default_rows(n)``, the first ``n`` rows stay; of one with several
    ``parametrize`` decorators, rows in which every value of each of them occurs.
    """
    tests: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        is_marked = item.get_closest_marker("slow") or item.get_closest_marker("exhaustive")
        if hasattr(item, "callspec") and not is_marked:
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for rows in tests.values():
        limit = rows[0].get_closest_marker("default_rows")
        kept = range(limit.args[0]) if limit else every_value([_axes_of(row) for row in rows])
        for index, row in enumerate(rows):
            if index not in kept:
                row.add_marker(pytest.mark.slow)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark rows that the default tier leaves out; drop the tiers that ``-m`` does not ask for.

    An expression that names no tier, as ``not extras``, selects from the default one, and an empty
    one is every row that is not exhaustive.
    """
    mark_products(items)
    expression = config.option.markexpr
    named = {tier for tier in ("slow", "exhaustive") if tier in expression}
    left_out = {"exhaustive"} - named if named or not expression else {"slow", "exhaustive"}
    is_left_out = [any(map(item.get_closest_marker, left_out)) for item in items]
    config.hook.pytest_deselected(items=list(itertools.compress(items, is_left_out)))
    items[:] = itertools.compress(items, map(operator.not_, is_left_out))


def _axes_of(row: Any) -> tuple[Any, ...]:
    """Return what each ``parametrize`` decorator and each fixture gives to ``row``, as ids."""
    values = dict(row.callspec.params)
    axes = []
    for mark in row.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        axes.append(tuple(id(values.pop(name)) for name in names))
    return (*axes, *map(id, values.values()))


def _shortest(sets: Sequence[set[Any]]) -> list[int]:
    return min((_greedy(sets, random.Random(number)) for number in range(TRIES)), key=len)


def _greedy(sets: Sequence[set[Any]], order: random.Random) -> list[int]:
    """Return indices of sets that together hold all that ``sets`` hold, of few sets."""
    indices = order.sample(range(len(sets)), len(sets))
    missing = set().union(*sets)
    chosen = []
    while missing:
        best = max(indices, key=lambda index: len(sets[index] & missing))
        missing -= sets[best]
        chosen.append(best)
    return sorted(chosen)


def _name_of(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return ",".join(str(getattr(part, "__name__", part)) for part in parts)


def _numbered_rows(rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, ...]]:
    columns = [_numbered(column) for column in zip(*rows, strict=True)]
    return list(zip(*columns, strict=True))


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
