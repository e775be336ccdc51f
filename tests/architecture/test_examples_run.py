"""Does the example train, and does it report what it promises?"""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

EXAMPLE = ROOT / "examples" / "train_gpt.py"
# The smallest run; `--json` names the file for the report, the figure goes to the folder we are in.
TINY = ["--steps", "3"]

REPORT_KEYS = {"bytes_per_step", "held_out_loss", "peak_bytes_per_rank", "steps", "tokens_per_s"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_the_example_trains_and_reports(tmp_path):
    report = tmp_path / "report.json"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *TINY, "--json", str(report)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    values = json.loads(report.read_text())
    assert set(values) >= REPORT_KEYS
    assert all(math.isfinite(values[key]) for key in ("held_out_loss", "tokens_per_s"))
    assert values["steps"] == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)
