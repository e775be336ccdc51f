"""Summaries and pictures of traces, and the command that makes them."""

import json
import sys
from unittest import mock

import pytest

from meshard.__main__ import main
from meshard.timeline import Timeline

LANES = {1: "compute", 2: "all-gather", 3: "all-gather 2", 4: "reduce-scatter", 5: "optimizer"}


def span(thread, category, began, duration, **args):
    unit = args.get("unit", "AdamW")
    head = {"ph": "X", "pid": 0, "tid": thread, "cat": category, "name": f"{category} {unit}"}
    return {**head, "ts": began, "dur": duration, "args": args}


def collective(thread, op, unit, began, duration, exposed=0.0):
    args = {"op": op, "unit": unit, "bytes": 2**20, "ranks": 2, "exposed us": exposed}
    return span(thread, "communication", began, duration, **args)


EVENTS = [
    *({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
      for tid, name in LANES.items()),
    {"ph": "C", "pid": 0, "name": "bytes alive", "ts": 0.0, "args": {"bytes": 3 * 2**20}},
    {"ph": "C", "pid": 0, "name": "bytes alive", "ts": 9000.0, "args": {"bytes": 5 * 2**20}},
    collective(2, "all_gather", "0", 0.0, 2000.0, 2000.0),
    collective(3, "all_gather", "1", 1000.0, 6000.0),
    collective(4, "reduce_scatter", "1", 8000.0, 2000.0, 500.0),
    span(1, "wait", 0.0, 2000.0, unit="0", kind="all-gather"),
    span(1, "forward", 2000.0, 5000.0, unit="0"),
    span(1, "backward", 7000.0, 2500.0, unit="1"),
    span(1, "wait", 9500.0, 500.0, unit="1", kind="reduce-scatter"),
    span(5, "optimizer", 10000.0, 1500.0),
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """A file of one rank, in which 2.5 of 10 ms of communication are exposed."""
    path = tmp_path / "trace.json"
    ranks = {"0": {"seconds": 0.0125, "memory": "resident memory of the process"}}
    path.write_text(json.dumps({"traceEvents": EVENTS, "otherData": {"ranks": ranks}}))
    return path


def test_the_summary_says_what_is_exposed_and_for_which_unit(path, capsys):
    assert main(["timeline", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: 12.5 ms traced: forward 5.0 ms, backward 2.5 ms, optimizer 1.5 ms, waits for "
        "communication 2.5 ms",
        "communication   count  payload    time  exposed  hidden  longest wait",
        "all-gather          2  2.0 MiB  8.0 ms   2.0 ms     75%  2.0 ms for 0",
        "reduce-scatter      1  1.0 MiB  2.0 ms   0.5 ms     75%  0.5 ms for 1",
        "hidden in all: 75%",
        "peak: 5.0 MiB (resident memory of the process)",
    ]
    (summary,) = Timeline.read(path).summaries()
    assert summary.hidden_share == 0.75 and summary.exposed == 0.0025


@pytest.mark.extras
def test_a_picture_has_a_row_for_each_lane_and_no_text_over_another(path, tmp_path):
    from matplotlib.figure import Figure

    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        assert main(["timeline", str(path), "-o", "t.png"]) == 0
    figure = save.call_args.args[0]
    lanes, memory = figure.axes
    figure.draw_without_rendering()
    assert [each.get_text() for each in lanes.get_yticklabels()] == list(LANES.values())
    assert memory.get_ylabel() == "MiB" and "milliseconds" in memory.get_xlabel()
    shown = [*lanes.texts, *lanes.get_yticklabels(), *memory.get_yticklabels(), memory.title]
    boxes = [each.get_window_extent() for each in shown if each.get_text()]
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]
    assert main(["timeline", str(path), "-o", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_without_matplotlib_an_error_says_what_helps(path, capsys):
    with mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None}):
        assert main(["timeline", str(path), "-o", "t.png"]) == 1
    assert "needs matplotlib (pip install matplotlib)" in capsys.readouterr().err


def test_what_is_no_trace_is_refused(path, capsys):
    for text in ("{}", '{"traceEvents": [], "otherData": {"ranks": [0]}}'):
        path.write_text(text)
        assert main(["timeline", str(path)]) == 1
        assert "is no file that meshard.trace has written" in capsys.readouterr().err
    assert main(["timeline", str(path.parent / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err


def test_of_many_ranks_eight_are_shown_or_those_that_are_chosen(path, capsys):
    content = json.loads(path.read_text())
    content["otherData"]["ranks"] = {str(r): {"seconds": 1.0, "memory": ""} for r in range(9)}
    path.write_text(json.dumps(content))
    assert main(["timeline", str(path)]) == 0
    out = capsys.readouterr().out
    assert "ranks 0 to 7 of 9" in out and "rank 7:" in out and "rank 8:" not in out
    assert main(["timeline", str(path), "--ranks", "8"]) == 0
    assert "rank 8:" in capsys.readouterr().out
    assert main(["timeline", str(path), "--ranks", "9"]) == 1
    assert "there is no rank 9" in capsys.readouterr().err
