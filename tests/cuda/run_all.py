"""All checks that need a CUDA device.

    python tests/cuda/run_all.py [REPORT.md] [--rehearse] [--part NAME ...] [--jobs 4]

Prints one row for each check, and writes the table to REPORT.md and what the checks have printed to
REPORT.log. Parts run in processes of their own: one that dies or hangs costs the check in which it
did, and is started again for those that are left. The exit code is 1 if any check failed, died or
hung. Without a device it says so, and the exit code is 0. ``--rehearse`` runs everything on the CPU
with small models: the figures mean nothing, but wrong arguments show.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# A module beside this one, its function that returns the checks by name, and seconds for all.
PARTS = {
    "one NCCL rank": ("parity", "one_rank", 300),
    "gloo ranks on one device": ("parity", "gloo_ranks", 300),
    "late streams": ("streams", "checks", 300),
    "backends": ("backends", "checks", 300),
    "traces": ("traces", "checks", 60),
    "owners": ("owners", "checks", 120),
    "pages": ("pages", "checks", 330),
    "plans": ("plans", "checks", 200),
    "memory": ("memory", "checks", 80),
    "times": ("times", "checks", 140),
}
ALONE = ("memory", "times", "plans")  # after the others
SECONDS_OF_A_CHECK = 110
SLOWER = {"cuda": 1, "cpu": 4}  # a rehearsal shares its cores with others
BAD = ("failed", "died", "hung", "not run")


class Row(NamedTuple):
    """What came of one check."""

    part: str
    check: str
    result: str  # passed, not rehearsed, or one of BAD
    figure: str = ""
    seconds: float = 0.0


def run_checks(part, kind, out, *skipped):
    """Run the checks of a part; write a line of JSON before and after each."""
    from tests.cuda.device import Device, NotRehearsed

    module, function, _ = PARTS[part]
    checks = getattr(importlib.import_module(f"tests.cuda.{module}"), function)(Device(kind))
    with open(out, "a") as lines:

        def write(*values):
            print(json.dumps(values), file=lines, flush=True)

        write("all", *checks)
        for name, check in checks.items():
            if name in skipped:
                continue
            write("begun", name)
            faulthandler.dump_traceback_later(SLOWER[kind] * SECONDS_OF_A_CHECK, exit=True)
            start, result = time.monotonic(), "passed"
            try:
                figure = check() or ""
            except NotRehearsed:
                result, figure = "not rehearsed", ""
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)
                first = (str(error).splitlines() or [""])[0]
                result, figure = "failed", f"{type(error).__name__}: {first[:200]}"
            faulthandler.cancel_dump_traceback_later()
            write("over", name, result, figure, time.monotonic() - start)


def run_part(part, kind, seconds, log):
    """Run a part, again and again until each check has a row; append what it prints to ``log``."""
    deadline, rows, names = time.monotonic() + seconds, {}, []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        while time.monotonic() < deadline and not (names and len(rows) == len(names)):
            out.write_text("")
            code = _start([part, kind, str(out), *rows], deadline, log)
            begun = None
            for what, name, *values in map(json.loads, out.read_text().splitlines()):
                if what == "all":
                    names = [name, *values]
                elif what == "begun":
                    begun, rows[name] = name, Row(part, name, "died")
                else:
                    begun, rows[name] = None, Row(part, name, *values)
            if begun is None:
                break  # through, or it could not even begin
            is_late = code is None or "Timeout (" in log.read_text(errors="replace")[-20_000:]
            rows[begun] = Row(part, begun, "hung" if is_late else "died", f"exit code {code}")
    if not names:
        last = log.read_text(errors="replace").splitlines() or ["it printed nothing"]
        return [Row(part, "(start)", "died", last[-1][:200])]
    return [rows.get(name) or Row(part, name, "not run") for name in names]


def _start(arguments, deadline, log):
    """Run ``run_checks`` in a process; return its exit code, None if it took too long."""
    command = [sys.executable, __file__, "--checks", *arguments]
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            return process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its ranks
            process.wait()


def table(rows):
    """Return the rows as Markdown."""
    lines = ["| part | check | result | figure | s |", "|---|---|---|---|---|"]
    for part, check, result, figure, seconds in rows:
        figure = figure.replace("|", "/")
        lines.append(f"| {part} | {check} | {result} | {figure} | {seconds:.1f} |")
    return "\n".join(lines)


def run(parts, kind, jobs, folder):
    """Run parts beside each other, then those that must be alone; return all rows."""

    def run_one(part):
        return run_part(part, kind, SLOWER[kind] * PARTS[part][2], folder / f"{part}.log")

    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(run_one, [part for part in parts if part not in ALONE]))
    rows += [run_one(part) for part in parts if part in ALONE]
    return [row for each in rows for row in each]


def main():
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args()
    import torch

    if not (args.rehearse or torch.cuda.is_available()):
        print("there is no CUDA device: nothing was run (--rehearse runs it on the CPU).")
        return 0
    kind = "cpu" if args.rehearse else "cuda"
    where = "a rehearsal on the CPU" if args.rehearse else torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args.part, kind, args.jobs or (1 if args.rehearse else 4), Path(folder))
        logs = "".join(
            f"===== {log.stem}\n{log.read_text(errors='replace')}\n"
            for log in sorted(Path(folder).glob("*.log"))
        )
    text = f"{where}, torch {torch.__version__}\n\n{table(rows)}\n"
    print(text)
    if args.report is not None:
        args.report.write_text(text)
        args.report.with_suffix(".log").write_text(logs)
    return int(any(row.result in BAD for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--checks"]:
        run_checks(*sys.argv[2:])
    else:
        sys.exit(main())
