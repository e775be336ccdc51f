"""Documents and docstrings: every block of Python and every example runs as it stands."""

import doctest
import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest
import torch.distributed as dist

import meshard
from tests import ROOT
from tests.house.pages import PAGES, blocks

SECONDS = 240
MODULES = [each.name for each in pkgutil.walk_packages(meshard.__path__, "meshard.")]
NO_NUMPY = "ignore:Failed to initialize NumPy"  # torch works without it
# Of these pages: transformers, safetensors, checkpoints.
NEED_EXTRAS = {"units.md", "settings.md", "weights.md", "checkpoints.md", "loops.md"}


@pytest.fixture(scope="module")
def run_page():
    """``run_page(page, folder, ranks)``: its exit code and what it printed."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-W", NO_NUMPY, "-m", "tests.house.pages"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run_page(page, folder, ranks=1):
        output = folder / "output.txt"
        request = json.dumps([str(page), str(folder), str(output), SECONDS, ranks])
        print(request, file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return code, "\n".join(each.read_text() for each in sorted(folder.glob("output.txt*")))

    with server:  # which closes its input, and waits
        yield run_page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("needs_extras", [False, pytest.param(True, marks=pytest.mark.extras)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_page_runs(run_page, tmp_path, needs_extras, ranks):
    found = []
    for number, page in enumerate(PAGES):
        if (page.name in NEED_EXTRAS) is needs_extras and blocks(page):
            own = tmp_path / str(number)
            own.mkdir()
            code, output = run_page(page, own, ranks)
            if code:
                found.append(f"{page.name}:\n{output}")
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_generation_on_two_ranks_gathers_each_unit_once(run_page, tmp_path):
    code, output = run_page(ROOT / "docs" / "how-to" / "generate.md", tmp_path, ranks=2)
    assert not code, output
    gathers = [line for line in output.splitlines() if "gathers" in line]
    assert gathers == ["50 gathers", "5 gathers"] * 2


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_the_examples_of_a_module_run(name):
    try:
        result = doctest.testmod(importlib.import_module(name), verbose=False)
    finally:
        if dist.is_initialized():  # examples let meshard make a group of one rank
            dist.destroy_process_group()
    assert not result.failed  # what failed was printed
