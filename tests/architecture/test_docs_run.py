"""Does every block of Python in the documents run as it stands?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.pages import blocks
from tests.architecture.sources import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _run_page(page, folder):
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "error", "-m", "tests.architecture.pages", str(page)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.exists() or blocks(page)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_a_page_runs(page, tmp_path):
    done = _run_page(page, tmp_path)
    assert not done.returncode, done.stdout + done.stderr


def test_blocks_share_names_and_a_no_run_block_is_only_compiled(tmp_path):
    page = _page(tmp_path, "x = 1", "print(x + 1)", "<!-- no-run: needs a GPU -->", "1 / 0")
    assert [block.runs for block in blocks(page)] == [True, True, False]
    done = _run_page(page, tmp_path)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_failing_block_names_its_line_of_the_page(tmp_path):
    page = _page(tmp_path, "x = 1", "y = x / 0")
    done = _run_page(page, tmp_path)
    assert done.returncode
    line = page.read_text().splitlines().index("y = x / 0") + 1
    assert f'page.md", line {line}' in done.stderr


def _page(folder: Path, *parts: str) -> Path:
    page = folder / "page.md"
    texts = [part if part.startswith("<") else f"```python\n{part}\n```" for part in parts]
    page.write_text("# A page\n\n" + "\n\n".join(texts) + "\n")
    return page
