"""``python -m meshard compare``: scripts that are equal, that have a fault, and that fail."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytestmark = pytest.mark.timeout(300)
RUNS, STEPS = ("torch", "meshard"), ("first", "last")
SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Done:
    """What the command has left."""

    code: int
    printed: str
    told: str

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.printed, parse_constant=pytest.fail)  # NaN and Infinity


def compare(*arguments, num_ranks=2):
    """Run the command in a process of its own, as users do."""
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"}
    ours["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "meshard", "compare", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | ours,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def compare_faulty(*arguments):
    done = compare("--json", "--steps", 2, SCRIPTS / "sharded.py", *arguments)
    return done.code, done.report


# --- equal ---------------------------------------------------------------------------------


def test_a_sharded_script_is_equal_to_the_last_bit():
    done = compare("--steps", 3, SCRIPTS / "sharded.py")
    assert done.code == 0, done.told
    lines = done.printed.splitlines()
    assert lines[0].split() == ["2", "ranks", "torch", "meshard"]
    rows = {line[:26].strip(): line[26:].split() for line in lines[1:-1]}
    assert rows["units"] == ["5", "5"]
    assert rows["steps"] == ["3", "3"]
    assert len(set(rows["mean loss of last step"])) == 1
    assert all(0 < float(each) < 10 for each in rows["seconds per step"])
    assert all(50 < float(each) < 5000 for each in rows["peak resident MiB"])
    assert lines[-1].startswith("Equal to the last bit")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--hook",)])
def test_a_script_with_ddp_is_equal_to_the_last_bit(arguments):
    done = compare("--json", SCRIPTS / "wrapped.py", *arguments)
    assert done.code == 0, done.told
    assert done.report["equal"] and done.report["first differences"] == []
    assert done.report["torch"]["units"] == done.report["meshard"]["units"] == 1
    assert done.report["meshard"]["steps"] == 5


# --- planted faults ------------------------------------------------------------------------


def test_a_factor_is_named_with_its_unit():
    code, report = compare_faulty("--fault", "factor")
    assert code == 1
    first = report["first differences"]
    assert {row["parameter"] for row in first} == {"1.0.weight", "1.0.bias"}
    assert all(row["step"] == 1 and row["kind"] == "gradient" for row in first)
    assert all(row["unit"] == "1" for row in first)
    assert all(row["meshard"] == row["torch"] / 2 for row in first)
    assert all(abs(row["relative"] - 0.5) < 0.1 for row in first)
    assert report["possible reasons"] == ["divide factor, by 0.5"]


@pytest.mark.slow
def test_a_lost_gradient_is_named_with_its_unit():
    code, report = compare_faulty("--fault", "lost")
    assert code == 1
    (row,) = report["first differences"]
    assert (row["step"], row["kind"], row["unit"]) == (1, "gradient", "1")
    assert row["parameter"] == "1.0.bias"
    assert row["meshard"] is None and row["torch"] > 0
    assert report["possible reasons"] == ["zero_grad between microbatches"]


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_named_in_valid_json():
    code, report = compare_faulty("--fault", "nan")
    assert code == 1
    (row,) = report["first differences"]
    assert (row["step"], row["kind"], row["parameter"]) == (1, "gradient", "1.0.bias")
    assert row["torch"] > 0
    assert row["meshard"] == "NaN" and row["relative"] == "Infinity"
    assert report["largest difference"] == "Infinity"


@pytest.mark.slow
def test_a_run_that_ends_early_is_told():
    code, report = compare_faulty("--fault", "stop")
    assert code == 1
    assert [report[run]["steps"] for run in RUNS] == [2, 1]
    assert {(row["step"], row["kind"]) for row in report["first differences"]} == {(2, "loss")}
    assert all(row["meshard"] is None for row in report["first differences"])


@pytest.mark.slow
def test_another_dtype_is_named_with_its_unit():
    code, report = compare_faulty("--fault", "dtype")
    assert code == 1
    first = report["first differences"]
    assert all(row["kind"] == "gradient" and row["unit"] == "1" for row in first)
    assert all(1e-4 < row["relative"] < 1e-2 for row in first)
    assert report["possible reasons"] == ["reduce_dtype of 16 bits"]


@pytest.mark.slow
def test_differences_within_rtol_are_told_and_are_no_failure():
    done = compare("--rtol", "0.1", "--steps", 1, SCRIPTS / "sharded.py", "--fault", "dtype")
    assert done.code == 0, done.told
    assert "First difference: gradient of step 1.\n  1.0." in done.printed
    assert " in unit 1: " in done.printed
    assert "within --rtol" in done.printed
    assert done.printed.endswith("Possible reasons: reduce_dtype of 16 bits.\n")


@pytest.mark.slow
def test_a_script_that_differs_by_itself_is_told(tmp_path):
    script = tmp_path / "random_script.py"
    text = (SCRIPTS / "sharded.py").read_text()
    script.write_text(text.replace("manual_seed(1 + dist.get_rank())", "seed()"))
    done = compare("--json", "--steps", 1, script)
    assert done.code == 1
    assert "the script gives other numbers in each run" in done.report["possible reasons"]


# --- the judge -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_float64_judges_both():
    script = (SCRIPTS / "sharded.py", "--reduce-dtype", "bfloat16")
    done = compare("--json", "--accuracy", "--rtol", 1, "--steps", 2, *script)
    assert done.code == 0, done.told
    torch, meshard = ([done.report[run][f"off float64, {at} step"] for at in STEPS] for run in RUNS)
    assert all(1e-4 < each < 1e-2 for each in torch + meshard)  # bfloat16 has 8 bits
    assert meshard[0] <= torch[0]


# --- scripts that cannot be compared -------------------------------------------------------


def test_a_failing_script_says_with_which_library_and_where():
    done = compare(SCRIPTS / "sharded.py", "--fault", "raise", num_ranks=1)
    assert done.code == 1 and done.printed == ""
    told = done.told[done.told.index("python -m meshard: ") :]
    assert told.startswith("python -m meshard: the run 'meshard' failed on rank 0, after 0 steps:")
    assert told.count("  File ") == 1 and "sharded.py" in told
    assert told.endswith("ArithmeticError: with meshard only\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("torch.optim.SGD(nn.Linear(2, 2).parameters()).step()", "nothing was sharded"),
        ("nn.Linear(2, 2)", "the script called step() of no optimizer"),
        ("__import__('os')._exit(7)", "failed without an exception:\n"),
    ],
)
def test_a_script_without_anything_to_compare_is_told(tmp_path, code, error):
    script = tmp_path / "script.py"
    script.write_text(f"import torch\nfrom torch import nn\n{code}\n")
    done = compare(script, num_ranks=1)
    assert done.code == 1 and done.printed == ""
    assert f"the run 'torch' {error}" in done.told


@pytest.mark.slow
def test_several_hosts_are_refused():
    done = compare("--nnodes", 2, SCRIPTS / "sharded.py")
    assert done.code == 1 and "compare runs on one host" in done.told
