"""Does every file answer one question, and is it short enough to be read?"""

import ast
import re

import pytest

from tests.architecture.sources import FILES, ROOT, SRC, short, tree

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 50  # docstrings do not count

TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


def _function_lines(node):
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES + TEST_FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=short)
def test_no_function_is_too_long(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _function_lines(node)
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", [p for p in FILES if p != SRC / "__init__.py"], ids=short)
def test_a_file_begins_with_the_question_it_answers(path):
    docstring = ast.get_docstring(tree(path))
    assert docstring is not None, "no docstring"
    assert re.search(r"\?( |$)", docstring.splitlines()[0]), docstring.splitlines()[0]
