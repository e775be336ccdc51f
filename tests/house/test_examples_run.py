"""Examples: they run, and report what they promise."""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.house.sources import ROOT

pytestmark = pytest.mark.full

EXAMPLES = ROOT / "examples"
# The smallest run; `--json` names the file for the report, the figure goes to the folder we are in.
TINY = ["--steps", "3"]
SMALL_GPT = ["--width", "40", "--depth", "2", "--sample", "20"]

REPORT_KEYS = {"bytes_per_step", "held_out_loss", "peak_bytes_per_rank", "steps", "tokens_per_s"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_example(name, folder, *args):
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_the_training_example_trains_and_reports(tmp_path):
    report = tmp_path / "report.json"
    run_example("train_gpt.py", tmp_path, *TINY, *SMALL_GPT, "--json", str(report))
    values = json.loads(report.read_text())
    assert set(values) >= REPORT_KEYS
    assert all(math.isfinite(values[key]) for key in ("held_out_loss", "tokens_per_s"))
    assert values["steps"] == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)


def test_the_replicated_example_has_the_losses_of_ddp(tmp_path):
    printed = run_example("replicate.py", tmp_path, *TINY)
    rows = [line.split() for line in printed.splitlines() if line[:4].strip().isdigit()]
    assert [int(step) for step, _, _ in rows] == [0, 1, 2]
    assert all(ours == theirs for _, ours, theirs in rows), printed
    assert (tmp_path / "replicate.png").read_bytes().startswith(PNG_SIGNATURE)


def test_ranks_that_are_dropped_leave_the_mean_of_the_others(tmp_path):
    printed = run_example("drop_ranks.py", tmp_path).splitlines()
    assert [line.split()[4] for line in printed] == ["4", "4", "2", "4"]
    assert all(line.endswith("True") for line in printed)


def test_the_page_shows_what_the_microbatch_example_prints(tmp_path):
    printed = run_example("hsdp_microbatches.py", tmp_path).strip()
    page = (ROOT / "docs" / "gradient-accumulation.md").read_text()
    assert f"```text\n{printed}\n```" in page, printed


def test_the_overlapped_optimizer_saves_gradients_and_draws_them(tmp_path):
    printed = run_example("overlap_optimizer.py", tmp_path, "--units", "4", "--width", "256")
    assert "same weights, bit for bit: yes" in printed
    overlapped = next(line for line in printed.splitlines() if "overlapped" in line)
    assert overlapped.split()[1:5] == ["0.1", "MiB", "0.0", "MiB"]  # of one unit; of none
    assert (tmp_path / "gradients.png").read_bytes().startswith(PNG_SIGNATURE)
