"""Examples, and the quick start of README: they run alone, and report what they promise."""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest

from meshard import CommLedger
from tests.house.pages import blocks
from tests.house.sources import ROOT

EXAMPLES = ROOT / "examples"
DRAWING = ("train_gpt", "hsdp_microbatches", "overlap_optimizer", "replicate", "sharding_map")
# The smallest run; `--json` names the file for the report, the figure goes to the folder we are in.
TINY = ["--steps", "3"]
SMALL_GPT = ["--width", "40", "--depth", "2", "--sample", "20"]

REPORT_KEYS = {"bytes_per_step", "held_out_loss", "peak_bytes_per_rank", "steps", "tokens_per_s"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def needing_extras(rows):
    """Return rows that begin with the name of an example, marked where that needs packages."""
    return [pytest.param(*row, marks=[pytest.mark.extras] * (row[0] in DRAWING)) for row in rows]


def run_script(folder, *command):
    """Run Python in ``folder``; return what it printed and what it complained of."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout, done.stderr


def run_example(name, folder, *args):
    return run_script(folder, EXAMPLES / name, *args)[0]


@pytest.fixture
def example(monkeypatch):
    """``example(name)``: the module of an example, whose ranks cannot be started."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def import_example(name):
        module = importlib.import_module(name)
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda *_: pytest.fail("ranks were started"))
        return module

    return import_example


# --- README's quick start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(1, marks=pytest.mark.full),
        pytest.param(2, marks=pytest.mark.full),
        pytest.param(4, marks=pytest.mark.exhaustive),
    ],
)
def test_the_quick_start_of_readme_runs_alone_and_ranks_draw_different_data(tmp_path, num_ranks):
    (block,) = blocks(ROOT / "README.md")
    script = tmp_path / "script.py"
    draw = "import sys\nsys.stdout.write(f'draws {torch.rand(()).item()}\\n')\n"
    script.write_text(f"{block.code}\n{draw}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    printed, _ = run_script(tmp_path, *(torchrun if num_ranks > 1 else []), script)
    assert len(set(re.findall(r"draws (\S+)", printed))) == num_ranks, printed
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0], printed


# --- what is wrong with a command line is said before ranks are started --------------------------


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    needing_extras(
        [
            *[(name, "--plot nowhere/x.png", "there is no folder nowhere") for name in DRAWING],
            *[(name, "--ranks 0", "0 is not a whole number") for name in (*DRAWING, "drop_ranks")],
            ("train_gpt", "--steps few", "few is not a whole number"),
            ("train_gpt", "--json nowhere/x.json", "there is no folder nowhere"),
            ("train_gpt", "--save nowhere/x", "there is no folder nowhere"),
            ("train_gpt", "--data nowhere.txt", "nowhere.txt is not a file"),
            ("train_gpt", "--data short.txt", "a text of 9 bytes is too short"),
            ("train_gpt", "--heads 3", "width 128 is not divisible by 3 heads"),
            ("train_gpt", "--batch 3", "cannot be divided over 2 ranks"),
            ("train_gpt", "--replicas 3", "2 ranks cannot be divided over --replicas 3"),
            ("hsdp_microbatches", "--replicas 3", "4 ranks cannot be divided over --replicas 3"),
            ("sharding_map", "--replicas 3", "4 ranks cannot be divided over --replicas 3"),
            ("replicate", "--data short.txt", "a text of 9 bytes is too short"),
        ]
    ),
)
def test_a_wrong_command_line_ends_in_one_line(
    example, monkeypatch, capsys, tmp_path, name, flags, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    module = example(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags.split()])
    with pytest.raises(SystemExit) as raised:
        module.main()
    usage, error = capsys.readouterr().err.splitlines()
    assert raised.value.code == 2
    assert usage.startswith("usage:")
    assert reason in error


@pytest.mark.parametrize("package", ["matplotlib", pytest.param("tqdm", marks=pytest.mark.extras)])
@pytest.mark.parametrize("name", DRAWING)
def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch, name, package):
    monkeypatch.syspath_prepend(EXAMPLES)
    for module in (name, "extras", "run_report"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    for loaded in [each for each in sys.modules if each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(SystemExit) as raised:
        importlib.import_module(name)
    assert raised.value.code == f'the examples need {package}: pip install "meshard[examples]"'


@pytest.mark.parametrize("name", needing_extras([[name] for name in (*DRAWING, "drop_ranks")]))
def test_an_example_heeds_the_number_of_ranks_of_torchrun(example, monkeypatch, tmp_path, name):
    started = []
    module = example(name)
    monkeypatch.setattr(module, "launch", lambda _, args: started.append(args))
    for variable, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "6", "RANK": "1"}.items():
        monkeypatch.setenv(variable, value)
    flags = ["--batch", "12"] if name == "train_gpt" else []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    monkeypatch.chdir(tmp_path)
    module.main()
    assert [args.ranks for args in started] == [6]


@pytest.mark.extras
def test_the_numbers_of_a_run_are_there_if_its_picture_fails(
    example, monkeypatch, capsys, tmp_path
):
    train_gpt, run_report = example("train_gpt"), example("run_report")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(run_report.History, "plot", fail)
    summary = run_report.Summary(
        held_out_loss=1.5, tokens_per_s=1, bytes_per_step=1, peak_bytes_per_rank=1, steps=1
    )
    args = Namespace(json=tmp_path / "numbers.json", plot=tmp_path / "loss.png", title="")
    with pytest.raises(OSError, match="no space left"):
        train_gpt.report(args, summary, run_report.History(), CommLedger(), "a sample")
    printed = capsys.readouterr().out
    assert "1.5000" in printed and "a sample" in printed
    assert json.loads(args.json.read_text())["held_out_loss"] == 1.5


# --- the examples run ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.extras
def test_the_training_example_trains_and_reports(tmp_path):
    report = tmp_path / "report.json"
    command = EXAMPLES / "train_gpt.py", *TINY, *SMALL_GPT, "--json", report
    printed, complaints = run_script(tmp_path, *command)
    assert "step/s" not in complaints  # a progress bar is for a terminal
    assert printed.startswith("2 CPU ranks, 0.1 million parameters, 0.33 million bytes of text")
    values = json.loads(report.read_text())
    assert set(values) >= REPORT_KEYS
    assert all(math.isfinite(values[key]) for key in ("held_out_loss", "tokens_per_s"))
    assert values["steps"] == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.full
@pytest.mark.extras
def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_ranks(tmp_path):
    report, common = tmp_path / "report.json", [*SMALL_GPT, "--steps", "4", "--save", "run"]
    run_example("train_gpt.py", tmp_path, *common, "--stop-at", "3", "--save-every", "2")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-3"]
    shutil.rmtree(tmp_path / "run/step-3")
    printed = run_example("train_gpt.py", tmp_path, *common, "--ranks", "1", "--json", str(report))
    assert "going on from step 2" in printed
    values = json.loads(report.read_text())
    assert [step for step, _ in values["train"]] == [3, 4]
    run_example("train_gpt.py", tmp_path, *SMALL_GPT, "--steps", "4", "--json", str(report))
    at_once = json.loads(report.read_text())
    assert values["held_out_loss"] == pytest.approx(at_once["held_out_loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.extras
def test_a_run_survives_a_crash_in_the_middle_of_a_save(tmp_path):
    printed = run_example("survive_a_crash.py", tmp_path)
    assert "rank 1 dies in the middle of the save of step 20" in printed
    assert "going on from step 10" in printed
    assert "the losses are those of a run that did not crash, bit for bit: yes" in printed
    assert (tmp_path / "survive_a_crash.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.full
@pytest.mark.extras
def test_the_replicated_example_has_the_losses_of_ddp(tmp_path):
    printed = run_example("replicate.py", tmp_path, *TINY)
    rows = [line.split() for line in printed.splitlines() if line[:4].strip().isdigit()]
    assert [int(step) for step, _, _ in rows] == [0, 1, 2]
    assert all(ours == theirs for _, ours, theirs in rows), printed
    assert (tmp_path / "replicate.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.full
def test_ranks_that_are_dropped_leave_the_mean_of_the_others(tmp_path):
    printed = run_example("drop_ranks.py", tmp_path).splitlines()
    assert [line.split()[4] for line in printed] == ["4", "4", "2", "4"]
    assert all(line.endswith("True") for line in printed)


@pytest.mark.full
@pytest.mark.extras
def test_the_page_shows_what_the_microbatch_example_prints(tmp_path):
    printed, _, drawn = run_example("hsdp_microbatches.py", tmp_path).strip().rpartition("\n\n")
    assert drawn.endswith("sync_modes.png")
    assert (tmp_path / "sync_modes.png").read_bytes().startswith(PNG_SIGNATURE)
    page = (ROOT / "docs" / "how-to" / "gradient-accumulation.md").read_text()
    assert f"```text\n{printed}\n```" in page, printed


@pytest.mark.full
@pytest.mark.extras
def test_the_overlapped_optimizer_saves_gradients_and_draws_them(tmp_path):
    script, small = EXAMPLES / "overlap_optimizer.py", ("--depth", "4", "--width", "256")
    printed, complaints = run_script(tmp_path, script, *small)
    assert not complaints  # of the profiler, say
    assert "same weights, bit for bit: yes" in printed
    overlapped = next(line for line in printed.splitlines() if "overlapped" in line)
    assert overlapped.split()[1:5] == ["0.1", "MiB", "0.0", "MiB"]  # of one unit; of none
    assert (tmp_path / "gradients.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.full
@pytest.mark.extras
def test_the_map_shows_what_each_rank_holds(tmp_path):
    printed = run_example("sharding_map.py", tmp_path)
    held = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()[1:5]]
    assert [row[:3] for row in held] == [[str(r), str(r // 2), str(r % 2)] for r in range(4)]
    assert [row[-1] for row in held] == ["rows 0 to 3", "rows 4 to 6"] * 2  # of seven
    assert (tmp_path / "sharding_map.png").read_bytes().startswith(PNG_SIGNATURE)


# --- what they leave behind ----------------------------------------------------------------------


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_git_lists_nothing_that_examples_leave_in_a_checkout():
    text = (EXAMPLES / "README.md").read_text()
    written = set(re.findall(r"--(?:save|json|plot) ([\w./]+)", text))
    for path in EXAMPLES.glob("*.py"):
        written |= set(re.findall(r'Path\("([\w.]+)"\)', path.read_text()))
    assert {"run", "loss.png"} <= written
    paths = [f"{folder}{name}" for folder in ("", "examples/") for name in sorted(written)]
    # A folder is ignored as one, so this asks for a file in it.
    paths = [path if "." in path else f"{path}/file" for path in paths]
    asked = subprocess.run(
        ["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert asked.stdout.split() == paths
