"""Public names: what users import exists, is documented, and is all that they can import."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

import meshard
from tests import ROOT
from tests.house.pages import PAGES
from tests.house.test_pages import LINK

# Names of torch.distributed.fsdp (FSDP2), under which meshard has its own.
FSDP2_NAMES = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
SINCE = {"DataParallelMeshDims": "2.12", "GradientReductionHandle": "2.15"}


def test_names_of_fsdp2_exist_here_and_there():
    names = [name for name in FSDP2_NAMES if torch.__version__ >= SINCE.get(name, "")]
    assert [name for name in names if not hasattr(torch_fsdp, name)] == []
    assert [name for name in FSDP2_NAMES if name not in meshard.__all__] == []


def test_methods_of_fsdp2_exist_and_take_the_same_arguments_or_more():
    def arguments(cls, name):
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    theirs = torch_fsdp.FSDPModule
    for name in [name for name in vars(theirs) if not name.startswith("_")]:
        assert getattr(meshard.FSDPModule, name) is not getattr(theirs, name), name
        expected = arguments(theirs, name)
        assert arguments(meshard.FSDPModule, name)[: len(expected)] == expected, name


def test_init_exports_exactly_what_it_imports_each_under_its_own_name():
    """It imports them at the first use of one, from ``_public.py``."""
    tree = ast.parse(Path(meshard.__file__).with_name("_public.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname in (None, alias.name) for alias in aliases)
    assert sorted(alias.name for alias in aliases) == sorted(meshard.__all__)


def test_documents_and_examples_use_public_names_only():
    pages = [*PAGES, *(ROOT / "examples").rglob("*.py")]
    private = re.compile(r"\b(?:from|import) meshard[\w.]*\._\w+")
    found = {page.name: private.findall(page.read_text()) for page in pages}
    assert {name: each for name, each in found.items() if each} == {}


def test_the_page_of_public_names_lists_each_once_with_a_line_and_a_link():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names)
    top = {name for name in names if "." not in name and not name.isupper()}
    assert top == set(meshard.__all__)
    for name, line, link in rows:
        path, _, attribute = name.rpartition(".")
        assert not path or hasattr(importlib.import_module(path), attribute), name
        assert re.fullmatch(r"[A-Z`].*\.", line) and LINK.fullmatch(link), name


@pytest.mark.slow
def test_the_version_is_that_of_the_package_and_costs_no_import():
    code = "import meshard; assert '__version__' not in vars(meshard)"
    subprocess.run([sys.executable, "-c", code], check=True)
    written = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert meshard.__version__ in (written[1], "0+unknown")
    assert not hasattr(meshard, "version")


def test_tab_completion_shows_what_users_use():
    shown = [name for name in dir(meshard) if not name.startswith("__")]
    assert sorted(shown) == sorted([*meshard.__all__, "checkpoint", "planning"])
    assert "__version__" in dir(meshard)
    assert meshard.__getattr__("checkpoint") is meshard.checkpoint  # as its first use does


@pytest.mark.slow
def test_subpackages_are_imported_at_their_first_use():
    code = """if True:
        import sys, meshard
        for name in ("checkpoint", "planning"):
            assert f"meshard.{name}" not in sys.modules
            names = getattr(meshard, name).__all__
            assert names and all(hasattr(getattr(meshard, name), each) for each in names)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
