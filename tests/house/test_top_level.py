"""The top of the repository: it holds what belongs there, and nothing else."""

import fnmatch

from tests.house.sources import ROOT

ALLOWED = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs",
    "examples",
    "pyproject.toml",
    "src",
    "tests",
}
NOT_OURS = {".git", "PKG-INFO"}  # of the version control; of a source distribution


def test_the_top_level_holds_only_what_belongs_there():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/") for line in lines if not line.startswith("#")]
    found = {
        path.name
        for path in ROOT.iterdir()
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert found - NOT_OURS <= ALLOWED


def test_what_a_release_needs_is_there():
    needed = {"CHANGELOG.md", "LICENSE", "README.md", "docs", "examples", "pyproject.toml"}
    assert needed <= {path.name for path in ROOT.iterdir()}
