"""The table of behaviours: every test that it names exists, and every situation has tests."""

import ast
import functools

from tests import ROOT
from tests.behaviours import BEHAVIOURS

TESTS = ROOT / "tests"


@functools.cache
def names_in(path):
    """Return the tests of a file, and the rows that its ``ROWS`` runs."""
    tree = ast.parse((TESTS / path).read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    rows = [
        node.value.elts
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "ROWS"
    ]
    return tests, {row.elts[0].id for row in (rows[0] if rows else ())}


def missing(node_id):
    """Return what of ``node_id`` does not exist, or nothing."""
    path, _, test = node_id.partition("::")
    test, _, row = test.rstrip("]").partition("[")
    if not (TESTS / path).is_file():
        return path
    tests, rows = names_in(path)
    if test not in tests or not test.startswith("test_"):
        return test
    return row if row not in rows and row else ""


def test_what_is_missing_is_found():
    path = "peers/test_peer_state.py"
    assert missing(f"{path}::test_the_peer_beside_us[copied]") == ""
    assert missing(f"{path}::test_we_are_right") == ""
    assert missing(f"{path}::test_the_peer_beside_us[coped]") == "coped"
    assert missing(f"{path}::test_we_are_wrong") == "test_we_are_wrong"
    assert missing(f"{path}::copied") == "copied"
    assert missing("peers/test_pear.py::test_it") == "peers/test_pear.py"


def test_every_test_that_is_named_exists():
    named = [test for behaviour in BEHAVIOURS for test in (*behaviour.ours, *behaviour.peer)]
    assert [test for test in named if missing(test)] == []


def test_every_situation_has_tests_and_a_run_of_the_peer_or_a_reason():
    situations = [behaviour.situation for behaviour in BEHAVIOURS]
    assert len(set(situations)) == len(situations)
    assert [
        behaviour.situation
        for behaviour in BEHAVIOURS
        if not behaviour.ours or bool(behaviour.peer) == bool(behaviour.no_peer)
    ] == []
