"""Examples, and the quick start of README: they run alone, and report what they promise."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from examples import train_gpt
from tests import ROOT
from tests.house.pages import blocks

EXAMPLES = ROOT / "examples"
SMALL_GPT = ["--width", "40", "--depth", "2", "--sample", "20"]

REPORT_KEYS = {"bytes_per_step", "held_out_loss", "peak_bytes_per_rank", "steps", "tokens_per_s"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_script(folder, *command, num_ranks=1):
    """Run a script in ``folder``; return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    command = [*(torchrun if num_ranks > 1 else []), *command]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr  # at the end of the interpreter
    return done.stdout


def run_example(name, folder, *args, num_ranks=1):
    return run_script(folder, EXAMPLES / name, *args, num_ranks=num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_quick_start_of_readme_runs_alone_and_ranks_draw_different_data(tmp_path, num_ranks):
    (block,) = blocks(ROOT / "README.md")
    script = tmp_path / "script.py"
    draw = "import sys\nsys.stdout.write(f'draws {torch.rand(()).item()}\\n')\n"
    script.write_text(f"{block.code}\n{draw}")
    printed = run_script(tmp_path, script, num_ranks=num_ranks)
    assert len(set(re.findall(r"draws (\S+)", printed))) == num_ranks, printed
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0], printed


def test_the_readme_lists_every_example():
    listed = re.findall(r"examples/(\w+)\.py` \|", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def numbers_after(word, printed):
    return [float(number) for number in re.findall(rf"{word} (\d+\.\d+)", printed)]


@pytest.mark.slow
def test_fsdp_has_the_losses_of_one_process_and_a_part_of_the_parameters(tmp_path):
    alone = numbers_after("loss", run_example("fsdp.py", tmp_path))
    assert len(alone) == 4 and alone[-1] < alone[0] - 2
    for num_ranks in (2, 4):
        printed = run_example("fsdp.py", tmp_path, num_ranks=num_ranks)
        assert numbers_after("loss", printed) == pytest.approx(alone, rel=1e-3), printed
        held, whole = map(float, re.search(r"([\d.]+) of ([\d.]+) MiB", printed).groups())
        assert held == pytest.approx(whole / num_ranks, abs=0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_hsdp_sends_what_the_page_says_and_has_the_loss_of_one_process(tmp_path):
    [alone] = set(numbers_after("loss", run_example("hsdp.py", tmp_path)))
    for num_ranks in (2, 4):
        printed = run_example("hsdp.py", tmp_path, num_ranks=num_ranks)
        assert numbers_after("loss", printed) == pytest.approx([alone] * 3, rel=1e-4)
    assert "rank 3: replica 1, shard 1: rows 256 to 511" in printed
    page = (ROOT / "docs" / "how-to" / "gradient-accumulation.md").read_text()
    for mode in ("NONE", "REDUCE_SCATTER", "FULL"):
        scatters, reduces, sent = re.search(rf"\n *{mode} +(\d+) +(\d+) +(\d+) ", page).groups()
        said = rf"{mode} *: .* sent per step {sent} MiB .*{scatters} reduce_scatter, {reduces} all_"
        assert re.search(said, printed), printed


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_goes_on_on_two(tmp_path):
    printed = run_example("checkpoint_elsewhere.py", tmp_path)
    assert "4 ranks on cpu: steps 1 to 10" in printed
    assert "2 ranks on cpu: steps 11 to 20" in printed
    assert "equal to one run: yes" in printed
    assert "steps 1 to 20" in run_example("checkpoint_elsewhere.py", tmp_path, num_ranks=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_muon_has_a_lower_loss_than_adamw_and_draws_both(tmp_path):
    args = ("--plot", "muon.png", "--steps", "60")
    printed = run_example("muon.py", tmp_path, *args, num_ranks=2)
    assert "each on one of 2 ranks" in printed
    adamw, muon = (float(loss) for loss in re.findall(r"to (\d+\.\d+)", printed))
    assert muon < adamw, printed
    assert (tmp_path / "muon.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "text"),
    [("tensor_parallel", "equal to one process: yes"), ("offload", "equal losses: yes")],
)
def test_an_example_equals_what_it_says(tmp_path, name, text, num_ranks):
    assert text in run_example(f"{name}.py", tmp_path, num_ranks=num_ranks)


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plain_peft_reads_the_adapter(tmp_path, num_ranks):
    pytest.importorskip("peft")
    printed = run_example("huggingface_lora.py", tmp_path, num_ranks=num_ranks)
    losses = numbers_after("loss", printed)
    assert losses[-1] < losses[0] - 0.3
    assert "plain peft gives the same logits from the saved adapter: yes" in printed


@pytest.mark.slow
def test_published_models_take_the_state_that_arithmetic_gives(tmp_path):
    printed = run_example("plan_models.py", tmp_path)
    assert re.findall(r"(\S+) on (\d+) ranks.*: (\S+) GB of state", printed) == [
        ("gpt:13b", "8", "25.7"),
        ("gpt:175b", "128", "21.8"),
        ("gpt:1t", "256", "63.0"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_that_are_dropped_leave_the_mean_of_the_others(tmp_path, num_ranks):
    printed = run_example("drop_ranks.py", tmp_path, num_ranks=num_ranks).splitlines()
    left = ["4", "4", "2", "4"] if num_ranks == 4 else ["1"] * 4
    assert [line.split()[4] for line in printed] == left
    assert all(line.endswith("True") for line in printed)


@pytest.mark.slow
@pytest.mark.extras
def test_a_run_survives_a_crash_in_the_middle_of_a_save(tmp_path):
    printed = run_example("survive_a_crash.py", tmp_path, "--out", "crash.png")
    assert "rank 1 dies in the middle of the save of step 20" in printed
    assert "going on from step 10" in printed
    assert "the losses are those of a run that did not crash, bit for bit: yes" in printed
    assert (tmp_path / "crash.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--steps few", "invalid int value: 'few'"),
        ("--data nowhere.txt", "No such file"),
        ("--data short.txt", "a text of 9 bytes is too short"),
        ("--heads 3", "width 128 is not divisible by 3 heads"),
        ("--batch 3 --microbatches 2", "cannot be divided over 1 ranks times 2"),
        ("--replicas 3", "1 ranks cannot be divided over --replicas 3"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(monkeypatch, capsys, tmp_path, flags, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *flags.split()])
    with pytest.raises(SystemExit) as raised:
        train_gpt.main()
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.extras
def test_the_main_job_trains_and_reports_alike_on_any_number_of_ranks(tmp_path):
    flags = ["--steps", "3", *SMALL_GPT, "--json", "report.json", "--plot", "loss.png"]
    losses = []
    for num_ranks, layout in ((1, []), (2, []), (4, ["--replicas", "2", "--microbatches", "2"])):
        printed = run_example("train_gpt.py", tmp_path, *flags, *layout, num_ranks=num_ranks)
        assert printed.startswith(f"{num_ranks} ranks"), printed
        values = json.loads((tmp_path / "report.json").read_text())
        assert set(values) >= REPORT_KEYS
        assert values["steps"] == 3
        losses.append([values["held_out_loss"], *(loss for _, loss in values["train"])])
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_ranks(tmp_path):
    report, common = tmp_path / "report.json", [*SMALL_GPT, "--steps", "4", "--json", "report.json"]
    stop = ["--save", "run", "--stop-at", "3", "--save-every", "2"]
    run_example("train_gpt.py", tmp_path, *common, *stop, num_ranks=2)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-2", "step-3"]
    shutil.rmtree(tmp_path / "run/step-3")
    printed = run_example("train_gpt.py", tmp_path, *common, "--save", "run")
    assert "going on from step 2" in printed
    values = json.loads(report.read_text())
    assert [step for step, _ in values["train"]] == [3, 4]
    run_example("train_gpt.py", tmp_path, *common, num_ranks=2)
    at_once = json.loads(report.read_text())
    assert values["held_out_loss"] == pytest.approx(at_once["held_out_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize(("args", "text"), [((), "it fits"), (("--whole",), "out of memory")])
def test_state_in_parts_fits_a_budget_that_whole_state_does_not(tmp_path, args, text):
    printed = run_example("fit_a_budget.py", tmp_path, *args, num_ranks=4)
    assert text in printed, printed
    losses = numbers_after("loss", printed)
    assert len(losses) == (4 if text == "it fits" else 0), printed
