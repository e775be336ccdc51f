"""Do a few rows of a product hold every pair of values, and do the others wait to be asked for?"""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering, every_pair, select


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


def test_every_row_is_a_test_and_those_that_add_no_pair_are_marked():
    rows = list(itertools.product("abc", [1, 2], [None, [3]]))
    params = covering(("x", "y", "z"), rows).args[1]
    assert [param.values for param in params] == rows
    marked = [place for place, param in enumerate(params) if param.marks]
    assert sorted([*marked, *every_pair(rows)]) == [*range(12)]
    assert {mark.name for place in marked for mark in params[place].marks} == {"exhaustive"}


def after_selecting(markexpr):
    """Return what is left of two tests, one of them marked, and what was reported as left out."""
    reported = []
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=markexpr),
        hook=SimpleNamespace(pytest_deselected=lambda items: reported.extend(items)),
    )
    items = [
        SimpleNamespace(name=name, get_closest_marker={name: name}.get)
        for name in ("plain", "exhaustive")
    ]
    select(config, items)
    return [item.name for item in items], [item.name for item in reported]


@pytest.mark.parametrize("markexpr", ["", "not slow", "slow"])
def test_what_is_marked_waits_to_be_asked_for(markexpr):
    assert after_selecting(markexpr) == (["plain"], ["exhaustive"])


@pytest.mark.parametrize("markexpr", ["exhaustive", "slow and exhaustive"])
def test_naming_the_marker_leaves_the_choice_to_pytest(markexpr):
    assert after_selecting(markexpr) == (["plain", "exhaustive"], [])
