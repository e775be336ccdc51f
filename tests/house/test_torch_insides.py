"""Torch's insides: private names, version checks and patches stand in ``_torch/`` only."""

import ast
import importlib
import os
import subprocess
import sys

import pytest

from tests.house.sources import ROOT, SOURCES, Source, new

VERSION_NAMES = ("torch.__version__", "torch.version", "torch.torch_version")
PATCHES = "_torch/patches.py"  # two methods, listed on a page of the docs


def private_part(name):
    """Return ``name`` up to its first private part, or None."""
    parts = name.split(".")
    for length, part in enumerate(parts, 1):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:length])
    return None


def private_uses(sources):
    """Return every private torch name with the offender that it would be, once per file."""
    found = {}
    for source in sources:
        for name, node in source.torch_uses():
            if private := private_part(name):
                found.setdefault((source.path, private), source.at(node, private))
    return found


def private_names_outside(sources):
    uses = private_uses(sources)
    return [where for (path, _), where in uses.items() if not path.startswith("_torch/")]


def version_checks(sources):
    """Find what asks for torch's version, or whether torch has a name."""
    found = []
    for source in sources:
        if source.room == "_torch":
            continue
        for name, node in source.torch_uses():
            if name.startswith(VERSION_NAMES):
                found.append(source.at(node, name))
        for node in source.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("hasattr", "getattr")
                and source.torch_name_of(node.args[0])
            ):
                found.append(source.at(node, ast.unparse(node)))
    return found


def patches(sources):
    """Find assignments to attributes of torch's modules and classes, and of any ``cls``."""
    found = []
    for source in sources:
        if source.path == PATCHES:
            continue
        for node in source.nodes:
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Delete):
                targets = node.targets
            else:
                targets = []
            for target in targets:
                if isinstance(target, ast.Attribute) and _is_of_torch(source, target.value):
                    found.append(source.at(node, ast.unparse(target)))
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("setattr", "delattr")
                and _is_of_torch(source, node.args[0])
            ):
                found.append(source.at(node, ast.unparse(node)))
    return found


def _is_of_torch(source, node):
    is_class = isinstance(node, ast.Name) and node.id.endswith(("cls", "_class"))
    return is_class or source.torch_name_of(node) is not None


def resolve(name):
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for length, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:length]))
        value = getattr(value, part)
    return value


def test_private_names_stand_in_one_folder():
    assert new(private_names_outside(SOURCES)) == []


def test_each_private_name_is_used_in_one_file():
    uses = private_uses(SOURCES)
    files = {}
    for path, name in uses:
        files.setdefault(name, []).append(path)
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_the_private_names_are_still_there():
    for _, name in private_uses(SOURCES):
        assert resolve(name) is not None, name
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("torch.utils._never_there")


def needed_at_import(names, library="meshard"):
    """Return those of torch's names without which ``library`` cannot be imported."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.house.without_names", library, *names],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.full
def test_the_library_can_be_imported_without_any_private_name():
    names = {name for source in SOURCES for name, _ in source.torch_uses() if private_part(name)}
    names -= {name for name in names if name.endswith("__")} | {"torch._C"}
    assert needed_at_import(sorted(names)) == []


@pytest.mark.full
def test_a_name_without_which_a_library_fails_is_found():
    names = ["torch.optim.lr_scheduler.LRScheduler", "torch.nn.Linear"]
    assert needed_at_import(names, "torch.optim.swa_utils") == names[:1]


def test_versions_are_asked_for_in_one_folder():
    assert version_checks(SOURCES) == []


def test_torch_is_patched_in_one_file():
    assert new(patches(SOURCES)) == []


def test_planted_uses_of_torchs_insides_are_found():
    text = """
import torch
from torch.optim import Optimizer
from torch.utils import _pytree
torch._C._nothing
if hasattr(torch.optim, "Muon") and torch.__version__ > "2":
    Optimizer.zero_grad = None
    setattr(torch.nn.Module, "zero_grad", None)
    optimizer_class.step = None
    self.step = None
"""
    planted = [Source("_mesh/layout.py", text)]
    assert sorted(private_names_outside(planted)) == [
        "_mesh/layout.py:4: torch.utils._pytree",
        "_mesh/layout.py:5: torch._C",
    ]
    assert sorted(version_checks(planted)) == [
        "_mesh/layout.py:6: hasattr(torch.optim, 'Muon')",
        "_mesh/layout.py:6: torch.__version__",
    ]
    assert sorted(patches(planted)) == [
        "_mesh/layout.py:7: Optimizer.zero_grad",
        "_mesh/layout.py:8: setattr(torch.nn.Module, 'zero_grad', None)",
        "_mesh/layout.py:9: optimizer_class.step",
    ]
    known = {"_mesh/layout.py: torch.utils._pytree"}  # wherever the line is
    assert new(private_names_outside(planted), known) == ["_mesh/layout.py:5: torch._C"]
    moved = [Source("_torch/private.py", text)]
    assert private_names_outside(moved) == version_checks(moved) == []
    assert patches([Source(PATCHES, text)]) == []
