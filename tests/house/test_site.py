"""The site: it builds without a warning, and its reference and search are complete."""

import ast
import html
import importlib.util
import re
import subprocess
import sys

import pytest

import meshard
import meshard.checkpoint
from tests import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extras]
# Linked from no page on purpose, or read by programs.
FILES = ("index.html", "llms.txt", "search.html", "reference/errors.html", "tutorial/index.html")


def messages_extension():
    """Return docs/_extensions/messages.py, which the site reads the texts of errors with."""
    path = ROOT / "docs" / "_extensions" / "messages.py"
    spec = importlib.util.spec_from_file_location("messages", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["messages"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return out


def words_of(page):
    """Return the text of a page of the site, with one space between words."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page.read_text())).split())


def test_the_pages_are_there(site):
    assert [name for name in FILES if not (site / name).is_file()] == []


def test_every_public_name_is_in_the_reference(site):
    anchors = set(re.findall(r'id="(meshard[\w.]+)"', (site / "reference/python.html").read_text()))
    names = {f"meshard.{name}" for name in meshard.__all__}
    names |= {f"meshard.checkpoint.{name}" for name in meshard.checkpoint.__all__}
    assert sorted(names - anchors) == []


def test_every_text_of_an_error_is_in_the_reference(site):
    page = words_of(site / "reference/errors.html")
    texts = [each.text for found in messages_extension().all_messages().values() for each in found]
    assert len(texts) > 250
    assert [text for text in texts if " ".join(text.split()) not in page] == []


def test_texts_are_read_from_all_ways_to_raise_and_warn():
    source = """
LONG = "a text with a name"
def f(unit, n):
    raise ValueError(f"unit {unit.label!r} has {n} of it")
    raise RuntimeError("one " + f"two {n}") from None
    raise Refused(self, LONG)
    warnings.warn("a warning text", stacklevel=2)
    warn_user(f"another {n} text")
    raise error
    raise KeyError(name)
"""
    found = messages_extension().messages_of(ast.parse(source))
    assert sorted((each.kind, each.text) for each in found) == [
        ("Refused", "a text with a name"),
        ("RuntimeError", "one two {n}"),
        ("ValueError", "unit {label} has {n} of it"),
        ("Warning", "a warning text"),
        ("Warning", "another {n} text"),
    ]


STEMS = ["acceler", "inv_freq", "memori", "safetensor", "hang", "hsdp"]


@pytest.mark.parametrize("word", STEMS)
def test_search_finds(site, word):
    assert word in re.findall(r"\w+", (site / "searchindex.js").read_text())
