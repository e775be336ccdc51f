"""Packages beyond pytest and hypothesis: a test that needs one is marked ``extras``."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

# Runs pytest as if these were not installed. What pytest loads by itself is named to it.
SCRIPT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
import pytest
sys.exit(pytest.main(["-p", "no:timeout", *sys.argv[1:]]))
"""


def packages_beyond_the_card():
    """Return the packages of all extras, as they are imported, without pytest and hypothesis."""
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    names = set(re.findall(r'"([\w-]+)[^"]*"', extras.partition("\n\n")[0]))
    return [*sorted(names - {"meshard", "pytest", "pytest-timeout", "hypothesis"}), "accelerate"]


@pytest.mark.slow
def test_the_others_are_collected_without_any_of_them():
    missing = packages_beyond_the_card()
    assert {"matplotlib", "mypy", "numpy", "tqdm", "transformers"} <= set(missing)
    options = ["-m", "not extras", "--collect-only", "-q", "--no-header"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(missing=missing), *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) > 1000
    assert not [line for line in collected if "test_gpt2" in line or "test_the_main_job" in line]
