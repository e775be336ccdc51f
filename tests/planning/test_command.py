import json
import os
import subprocess
import sys

import pytest

from meshard.__main__ import main

JOB = """
import meshard, torch

def job(width=64, bias=True):
    model = meshard.fully_shard(torch.nn.Linear(width, width, bias=bias))
    print("a job may print")
    return lambda: model(torch.ones(1, width)).sum().backward()

def failing():
    return {}["no such key"]

number = 3
"""


@pytest.fixture(autouse=True)
def in_folder_of_the_job(tmp_path, monkeypatch):
    (tmp_path / "train_of_plan.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("train_of_plan", None)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train_of_plan:job", "--world", "4"], 0),
        (["train_of_plan:job", "--world", "4", "--limit", "1GB", "--set", "width=512"], 0),
        (["train_of_plan:job", "--world", "4", "--limit", "1kB"], 1),
        (["train_of_plan:job", "--world", "4", "--limit", "0B"], 1),
        (["train_of_plan:job", "--world", "4", "--fit", "1kB"], 1),
        (["train_of_plan:job", "--world", "4", "--fit", "1GB", "--sweep", "width=64,128"], 0),
        (["train_of_plan:job", "--world", "4", "--sweep", "width=64,128", "--limit", "1kB"], 1),
    ],
)
def test_the_exit_code_says_whether_it_fits(arguments, code, capsys):
    assert main(["plan", *arguments]) == code
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train_of_plan", "--world", "4"], "PKG:FUNCTION"),
        (["train_of_plan:other", "--world", "4"], "no function 'other'"),
        (["train_of_plan:number", "--world", "4"], "no function 'number'"),
        (["no_such_module:job", "--world", "4"], "no_such_module"),
        (["train_of_plan:job", "--world", "4", "--set", "depth=3"], "argument 'depth'"),
        (["train_of_plan:job", "--world", "4", "--set", "width"], "KEY=VALUE"),
        (["train_of_plan:job", "--world", "4", "--sweep", "width="], "KEY=A,B"),
        (
            ["train_of_plan:job", "--world", "4", "--sweep", "width=1", "--sweep", "width=2"],
            "KEY=A,B",
        ),
        (["train_of_plan:job", "--world", "0"], "world_size=0"),
        (["train_of_plan:job", "--world", "4", "--device", "gpu"], "device string: gpu"),
        (["train_of_plan:job", "--world", "4", "--device", "cuda:0"], "'cuda', got 'cuda:0'"),
        (["train_of_plan:job", "--world", "4", "--limit", "many"], "80GB"),
        (["train_of_plan:failing", "--world", "4"], "train_of_plan.py:10"),
        (["train_of_plan:failing", "--world", "4", "--fit", "1GB"], "no such key"),
        (["train_of_plan:job", "--world", "4", "--plot", "no_folder/a.png"], "no_folder"),
        (["train_of_plan:job", "--world", "4", "--plot", "a.png", "--fit", "1GB"], "one plan"),
        (["train_of_plan:job", "--world", "4", "--json", "--fit", "1GB"], "--sweep"),
    ],
)
def test_wrong_commands_say_what_is_right(arguments, text, capsys):
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_json_is_for_scripts(capsys):
    assert main(["plan", "train_of_plan:job", "--world", "4", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["world_size"] == 4
    assert printed.err == "a job may print\n"
    sweep = ["--sweep", "width=64,{1},128", "--json"]  # {1} is a set, which JSON does not have
    assert main(["plan", "train_of_plan:job", "--world", "4", *sweep]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["settings"]["width"] for row in rows] == [64, 128, "{1}"]


def test_a_table_ranks_settings(capsys):
    main(["plan", "train_of_plan:job", "--world", "4", "--sweep", "width=128,64"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["width", "peak"]
    assert [line.split()[0] for line in lines[1:]] == ["64", "128"]
    for head in ("peak", "sent", "between nodes"):  # above sizes, which stand to the right
        end = lines[0].index(head) + len(head)
        assert all(line[:end].endswith("B") for line in lines[1:])


@pytest.mark.slow
def test_it_runs_from_a_shell(tmp_path):
    command = [sys.executable, "-m", "meshard", "plan", "train_of_plan:job", "--world", "4096"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "a job may print\n"
    assert "peak" in done.stdout
