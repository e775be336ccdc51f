"""Selection of rows: few rows hold every value or pair; the others have tiers of their own."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering, every_pair, every_value, mark_products, select


def pairs_of(rows):
    numbered = (enumerate(row) for row in rows)
    return {pair for row in numbered for pair in itertools.combinations(row, 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.data())
def test_every_pair_of_the_rows_is_in_those_that_are_chosen(sizes, data):
    rows = list(itertools.product(*map(range, sizes)))
    kept = [row for row in rows if data.draw(st.booleans())] if len(rows) < 30 else rows
    chosen = every_pair(kept)
    assert len(set(chosen)) == len(chosen)
    assert pairs_of(kept[place] for place in chosen) == pairs_of(kept)


def test_a_product_shrinks_to_about_its_two_longest_axes():
    rows = list(itertools.product(range(11), range(4), range(2), range(2)))
    assert 44 <= len(every_pair(rows)) <= 48


def test_values_count_by_equality_and_type():
    assert len(every_pair([([1], True), ([1], 1), ([1], True)])) == 2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_value_is_in_as_many_rows_as_the_longest_axis_has(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[index] for index in every_value(rows)]
    assert [set(column) for column in zip(*chosen, strict=True)] == [set(range(n)) for n in sizes]
    assert len(chosen) <= max(sizes) + 1


def test_every_row_is_a_test_in_one_of_three_tiers():
    rows = list(itertools.product("abc", [1, 2], [None, [3]]))
    params = covering(("x", "y", "z"), rows).args[1]
    assert [param.values for param in params] == rows
    tiers = [[mark.name for mark in param.marks] for param in params]
    pairs = [index for index, tier in enumerate(tiers) if tier != ["exhaustive"]]
    assert pairs == every_pair(rows)
    default = [rows[index] for index, tier in enumerate(tiers) if tier == []]
    assert [len({str(row[axis]) for row in default}) for axis in range(3)] == [3, 2, 2]
    assert 3 <= len(default) < len(pairs) < len(rows)


class Row:
    """As much of a pytest item as the selection looks at."""

    parent, originalname = "file", "test"

    def __init__(self, *marks, **params):
        self.marks = list(marks)
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def iter_markers(self, name):
        return [mark for mark in self.marks if mark.name == name]

    def add_marker(self, mark):
        self.marks.append(mark)


def full_rows(rows):
    mark_products(rows)
    return [row.callspec.params for row in rows if row.get_closest_marker("slow")]


def test_of_several_decorators_the_default_tier_has_every_value():
    marks = [pytest.mark.parametrize("x", [1, 2]), pytest.mark.parametrize(("y", "z"), [])]
    pairs = [("a", 1), ("a", 2)]  # of one decorator: a value of its own each
    rows = [Row(*marks, x=x, y=y, z=z) for x in (1, 2) for y, z in pairs]
    left_out = full_rows(rows)
    assert len(left_out) == 2
    assert left_out[0]["x"] != left_out[1]["x"] and left_out[0]["z"] != left_out[1]["z"]


def test_of_one_decorator_all_rows_stay_unless_the_test_says_how_many():
    mark = pytest.mark.parametrize("x", [1, 2, 3])
    assert full_rows([Row(mark, x=x) for x in (1, 2, 3)]) == []
    limit = pytest.mark.default_rows(1)
    assert full_rows([Row(mark, limit, x=x) for x in (1, 2, 3)]) == [{"x": 2}, {"x": 3}]


def test_rows_that_are_marked_already_do_not_count():
    mark = pytest.mark.parametrize("x", [1, 2, 3])
    first = Row(mark, pytest.mark.slow, pytest.mark.default_rows(1), x=1)
    others = [Row(mark, pytest.mark.default_rows(1), x=x) for x in (2, 3)]
    assert full_rows([first, *others]) == [{"x": 1}, {"x": 3}]


def after_selecting(markexpr):
    """Return what is left of three tests, two of them marked, and what was reported as left out."""
    reported = []
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=markexpr),
        hook=SimpleNamespace(pytest_deselected=lambda items: reported.extend(items)),
    )
    items = [
        SimpleNamespace(name=name, get_closest_marker={name: name}.get)
        for name in ("plain", "full", "exhaustive")
    ]
    select(config, items)
    return [item.name for item in items], [item.name for item in reported]


@pytest.mark.parametrize("markexpr", ["", "full or not full", "full"])
def test_what_is_exhaustive_waits_to_be_asked_for(markexpr):
    assert after_selecting(markexpr) == (["plain", "full"], ["exhaustive"])


@pytest.mark.parametrize("markexpr", ["exhaustive", "not full and not exhaustive"])
def test_naming_the_marker_leaves_the_choice_to_pytest(markexpr):
    assert after_selecting(markexpr) == (["plain", "full", "exhaustive"], [])


@pytest.mark.parametrize("markexpr", ["not extras", "extras"])
def test_an_expression_that_names_no_tier_is_about_the_default_one(markexpr):
    assert after_selecting(markexpr) == (["plain"], ["full", "exhaustive"])
