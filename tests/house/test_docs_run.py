"""Documents: every block of Python runs as it stands."""

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.house.pages import blocks

SECONDS = 240
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_NUMPY = "ignore:Failed to initialize NumPy"  # torch works without it
# Of these pages: transformers, safetensors, checkpoints.
NEED_EXTRAS = {
    "units.md",
    "getting-started.md",
    "weights.md",
    "checkpoints.md",
    "loops.md",
}


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


def failing_pages(run_page, pages, folder, ranks=1):
    """Run pages each in a folder of its own; return what the failing ones print."""
    found = []
    for number, page in enumerate(pages):
        own = folder / str(number)
        own.mkdir()
        code, output = run_page(page, own, ranks)
        if code:
            found.append(f"{page.name}:\n{output}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("needs_extras", [False, pytest.param(True, marks=pytest.mark.extras)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_page_runs(run_page, tmp_path, needs_extras, ranks):
    pages = [page for page in PAGES if (page.name in NEED_EXTRAS) is needs_extras]
    found = failing_pages(run_page, [page for page in pages if blocks(page)], tmp_path, ranks)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_generation_on_two_ranks_gathers_each_unit_once(tmp_path):
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    page = str(ROOT / "docs" / "how-to" / "generate.md")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = ["--redirects", "3", "--log-dir", str(tmp_path)]  # or the lines of ranks would mix
    done = subprocess.run(
        [sys.executable, *launch, *logs, "-m", "tests.house.pages", page],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    printed = [log.read_text() for log in tmp_path.rglob("std*.log")]
    assert not done.returncode, "\n".join([done.stderr, *printed])
    of_ranks = [text.splitlines() for text in printed if "gathers" in text]
    assert len(of_ranks) == 2
    for lines in of_ranks:
        assert [line for line in lines if "gathers" in line] == ["50 gathers", "5 gathers"]
