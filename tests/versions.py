"""The tests on every supported torch and Python.

    python tests/versions.py [NAME ...] [--root FOLDER] [--keep] [--marker EXPRESSION]

Makes an environment for each row of docs/reference/versions.md in turn (some 5 GB each, from PyPI),
installs meshard as README.md says, runs ``pytest`` from this checkout, prints a table and writes it
into the page. Each also writes a checkpoint, and loads those of all environments before it; with
``--keep``, of those after it too. With names (``torch-2.12``, ``python-3.13``) only those rows.
``--keep`` leaves environments where they are; the next run with the same ``--root`` uses them
again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "reference" / "versions.md"
INSTALL_LIMIT, TEST_LIMIT = 1800, 2400  # seconds


@dataclass(frozen=True)
class Environment:
    """One row of the table."""

    name: str
    torch: str
    python: str = "3.11"


ENVIRONMENTS = (
    *(Environment(f"torch-2.{minor}", f"2.{minor}.0") for minor in (11, 12, 13, 14, 15)),
    *(Environment(f"python-{version}", "2.13.0", version) for version in ("3.10", "3.12", "3.13")),
)


def find_python(version: str) -> str:
    """Return an interpreter of that version: on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [on_path] if on_path else []
    candidates += [str(each) for each in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in candidates:  # one of pyenv's may stand on the PATH and not run
        asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if asked.stdout.strip() == version:
            return python
    raise SystemExit(f"no Python {version} was found, neither on the PATH nor in {pyenv}.")


def install(environment: Environment, folder: Path) -> Path:
    """Make the environment, unless it is there; return its Python."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([find_python(environment.python), "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        # First, and with pytest's plugins: a later range then installs no other torch.
        subprocess.run([*pip, f"torch=={environment.torch}"], check=True, timeout=INSTALL_LIMIT)
        wanted = f"{CHECKOUT}[test]"
        subprocess.run([*pip, "--editable", wanted], check=True, timeout=INSTALL_LIMIT)
        done.touch()
    return python


def run_tests(python: Path, marker: str | None, log: Path) -> str:
    """Run the tests, and return what pytest said last: "1,700 passed in 300 s", or what failed."""
    command = [python, "-m", "pytest", *(["-m", marker] if marker else [])]
    variables = {
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    with log.open("w") as out:
        try:
            subprocess.run(
                command,
                cwd=CHECKOUT,
                env={**os.environ, **variables},
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=TEST_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done after {TEST_LIMIT} s"
    said = re.findall(r"^=+ (.*) in [\d.]+s.*=+$", log.read_text(), re.MULTILINE)
    return said[-1] if said else "pytest did not end: " + log.read_text()[-200:]


def exchange(python: Path, root: Path) -> None:
    """Let an environment write a checkpoint and load those of the others, or raise."""
    command = [python, "-m", "tests.checkpoint.exchange", str(root / "checkpoints")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    (root / "checkpoints").mkdir(exist_ok=True)
    subprocess.run(command, cwd=CHECKOUT, env=env, timeout=TEST_LIMIT, check=True)


def commit() -> str:
    """Return the short name of the commit that is checked out, with a + if files differ."""
    git = ["git", "-C", str(CHECKOUT)]
    name = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "src", "tests"],
        capture_output=True,
        text=True,
        check=True,
    )
    return name.stdout.strip() + ("+" if changed.stdout else "")


def row_of(environment: Environment, python: Path, result: str, seconds: float) -> str:
    """Return the line of the table."""
    ask = "import platform, torch; print(torch.__version__, platform.python_version())"
    versions = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    torch, interpreter = versions.stdout.split()
    minutes = "{}:{:02}".format(*divmod(round(seconds), 60))
    cells = [environment.name, torch, interpreter, result, minutes, date.today(), commit()]
    return "| " + " | ".join(map(str, cells)) + " |"


def write_row(row: str) -> None:
    """Replace the row of the same name in the page."""
    name = row.split(" | ")[0]
    page = re.sub(rf"^{re.escape(name)} \|.*$", lambda _: row, PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=" ".join(each.name for each in ENVIRONMENTS))
    parser.add_argument(
        "--root", type=Path, help="where environments are made; default: a temporary folder"
    )
    parser.add_argument("--keep", action="store_true", help="do not remove environments")
    parser.add_argument("--marker", help="of pytest -m; default: the first tier")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {each.name for each in ENVIRONMENTS}
    if unknown:
        parser.error(f"no environment is called {', '.join(sorted(unknown))}")
    root = (chosen.root or Path(tempfile.mkdtemp(prefix="versions-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    rows, kept = [], list[Path]()
    for environment in ENVIRONMENTS:
        if chosen.names and environment.name not in chosen.names:
            continue
        folder, log = root / environment.name, root / f"{environment.name}.txt"
        print(f"{environment.name}: installing", flush=True)
        python = install(environment, folder)
        print(f"{environment.name}: testing, see {log}", flush=True)
        start = time.monotonic()
        result = run_tests(python, chosen.marker, log)
        rows.append(row_of(environment, python, result, time.monotonic() - start))
        print(rows[-1], flush=True)
        if not chosen.marker:
            write_row(rows[-1])
        exchange(python, root)
        kept.append(python)
        if not chosen.keep:
            shutil.rmtree(folder)
    for python in kept if chosen.keep else ():
        exchange(python, root)
    print("\n".join(["", *rows]))
    return int(any("failed" in row or "error" in row or "not " in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
