"""Timelines of files of torch.profiler: what is exposed, who waits for whom, and the picture."""

import gzip
import json
import re
import sys
import time
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import CommLedger
from meshard.__main__ import main
from meshard.timeline import read, summary_of
from tests.support.ranges import profiled
from tests.support.ranks import on_ranks

MS = 1000.0
SLEEP = 0.2  # of the slow rank


def event(name, began, duration, category="user_annotation", thread=1, **args):
    head = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "args": args}
    return {**head, "ts": MS * began, "dur": MS * duration}


def trace(*events, rank=0, ahead=0.0):
    """Return the content of a file of a rank, whose clock is ahead by milliseconds."""
    moved = [{**each, "ts": each["ts"] + MS * ahead} for each in events]
    return {"traceEvents": moved, "distributedInfo": {"rank": rank}}


STEP = (
    event("meshard::forward 0", 0, 0),
    event("meshard::all_gather 0", 0, 0.5),
    event("gloo:all_gather", 0, 2, thread=7),
    event("meshard::all_gather 1", 0.5, 0.5),
    event("gloo:all_gather", 2, 4, thread=8),
    event("meshard::wait all_gather 0", 1, 1),
    event("meshard::forward 1", 7, 0),
    event("meshard::wait all_gather 1", 7, 0.5),
    event("meshard::backward 1", 8, 0),
    event("meshard::reduce 1", 8.5, 1),
    event("meshard::reduce_scatter 1", 9, 0.5),
    event("gloo:all_to_all", 9, 2, thread=7),
    event("meshard::wait reduce_scatter 1", 10.5, 0.5),
    event("meshard::outside of units", 11, 0),
    event("meshard::all_reduce (norm)", 11, 0.5),
    event("Optimizer.step#AdamW.step", 11.5, 1.5),
    event("Optimizer.step#Inner.step", 12, 0.5),
)


@pytest.fixture
def files(tmp_path):
    """Return a function that writes the files of ranks, and gives their paths."""

    def write(*contents):
        paths = [tmp_path / f"trace-{number}.json" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_text(json.dumps(content))
        return list(map(str, paths))

    return write


def printed(capsys, paths):
    assert main(["timeline", *paths]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_says_what_is_exposed_and_for_which_unit(files, capsys):
    assert printed(capsys, files(trace(*STEP))) == [
        "rank 0: 13.0 ms recorded: forward 6.5 ms, backward 2.5 ms, optimizer 1.5 ms, waits for "
        "communication 2.5 ms",
        "communication   count    time  exposed  hidden  longest wait",
        "all-gather          2  7.5 ms   1.5 ms     80%  1.0 ms for 0",
        "reduce-scatter      1  2.0 ms   0.5 ms     75%  0.5 ms for 1",
        "all-reduce          1  0.5 ms   0.5 ms      0%  0.5 ms for (norm)",
    ]


def test_a_closure_counts_for_the_units_that_it_runs(files, capsys):
    step = (
        event("Optimizer.step#LBFGS.step", 0, 10),
        event("meshard::forward 0", 1, 0),
        event("meshard::all_gather 0", 1, 1),
        event("meshard::backward 0", 4, 0),
        event("meshard::outside of units", 9, 0),
    )
    assert printed(capsys, files(trace(*step)))[0] == (
        "rank 0: 9.0 ms recorded: forward 2.0 ms, backward 5.0 ms, optimizer 1.0 ms, waits for "
        "communication 1.0 ms"
    )


def test_a_wait_until_another_rank_came_names_it(files, capsys):
    late = [event("meshard::all_gather 0", 1.75, 0.1), event("meshard::wait all_gather 0", 1.9, 0)]
    other = [each for each in STEP if each["name"] not in {e["name"] for e in late}]
    lines = printed(capsys, files(trace(*STEP), trace(*other, *late, rank=1)))
    assert [each for each in lines if "until rank" in each] == [
        "waited 0.8 ms until rank 1 came, 0.8 ms of it to the all-gather of 0"
    ]


def test_ranks_of_other_groups_are_not_waited_for(files, capsys):
    def rank_of(number, ranks, began):
        return trace(
            event("meshard::all_gather 0", began, 0.5),
            event(f"meshard::ranks {ranks}", began + 0.1, 0),
            event("meshard::wait all_gather 0", began + 1, 8),
            rank=number,
        )

    begins = {0: 0, 1: 3, 2: 7, 3: 0}
    paths = files(*(rank_of(n, "0,1" if n < 2 else "2,3", begins[n]) for n in range(4)))
    assert [line for line in printed(capsys, paths) if "until rank" in line] == [
        "waited 2.0 ms until rank 1 came, 2.0 ms of it to the all-gather of 0",
        "waited 6.0 ms until rank 2 came, 6.0 ms of it to the all-gather of 0",
    ]


def test_clocks_of_other_hosts_are_set_by_collectives(files, capsys):
    """No rank leaves a collective before all have begun it."""
    same = printed(capsys, files(trace(*STEP), trace(*STEP, rank=1)))
    assert printed(capsys, files(trace(*STEP), trace(*STEP, rank=1, ahead=5000)))[0] == same[0]
    assert not [line for line in same if "until rank" in line]


def test_on_a_device_its_own_times_count(files, capsys):
    """The host launches all in 2 ms; the device takes 13 ms, and waits for 1 + 3 ms."""

    def launch(number, began):
        return event("cudaLaunchKernel", began, 0.01, "cuda_runtime", correlation=number)

    def kernel(number, began, duration, stream=7):
        args = {"correlation": number, "stream": stream}
        return event(f"kernel {number}", began, duration, "kernel", stream, **args)

    def on_device(name, began, duration):
        return event(f"meshard::{name}", began, duration, "gpu_user_annotation", 20)

    lines = printed(
        capsys,
        files(
            trace(
                event("meshard::forward 0", 0, 0),
                event("meshard::all_gather 0", 0, 0.1),
                on_device("all_gather 0", 0.5, 1),
                kernel(1, 0.5, 1, stream=20),
                event("meshard::wait all_gather 0", 0.5, 0),
                launch(2, 0.6),
                kernel(2, 1.5, 4),
                event("meshard::all_gather 1", 0.7, 0.1),
                on_device("all_gather 1", 1.5, 7),
                kernel(3, 1.5, 7, stream=20),
                event("meshard::forward 1", 0.8, 0),
                event("meshard::wait all_gather 1", 0.9, 0),
                launch(4, 1.0),
                kernel(4, 8.5, 3),
                event("Optimizer.step#AdamW.step", 1.5, 0.5),
                launch(5, 1.6),
                kernel(5, 11.5, 2),
            )
        ),
    )
    assert lines == [
        "rank 0: 13.0 ms recorded: forward 7.0 ms, optimizer 2.0 ms, waits for "
        "communication 4.0 ms",
        "communication  count    time  exposed  hidden  longest wait",
        "all-gather         2  8.0 ms   4.0 ms     50%  3.0 ms for 1",
    ]


@pytest.mark.parametrize("shares_memory", ["0", "1"])
@on_ranks(2)
def test_the_slow_one_of_two_ranks_is_named(tmp_path, monkeypatch, shares_memory):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", shares_memory)
    rank, model = dist.get_rank(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)

    def step(seconds=0.0):
        loss = model(torch.ones(2, 8)).sum()
        time.sleep(rank * seconds)
        loss.backward()

    step()
    with profiled() as profiler, CommLedger() as ledger:
        step(SLEEP)
    profiler.export_chrome_trace(str(tmp_path / f"trace-{rank}.json.gz"))
    dist.barrier()
    timelines = read([tmp_path / f"trace-{each}.json.gz" for each in (1, 0)])
    for timeline in timelines:
        kinds = Counter(each.lane.replace("-", "_") for each in timeline.collectives)
        assert kinds == ledger.counts
    waited = [re.search(r"waited ([\d.]+) ms until", summary_of(each)) for each in timelines]
    assert "until rank 1 came" in summary_of(timelines[0])
    assert float(waited[0][1]) > 0.8 * 1000 * SLEEP
    assert waited[1] is None or float(waited[1][1]) < 0.5 * 1000 * SLEEP


@pytest.mark.extras
def test_a_picture_has_a_row_for_each_lane_and_no_text_over_another(files, tmp_path):
    from matplotlib.figure import Figure

    paths = files(trace(*STEP), trace(*STEP, rank=1))
    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        assert main(["timeline", *paths, "-o", "t.png"]) == 0
    figure = save.call_args.args[0]
    figure.draw_without_rendering()
    lanes = ["compute", "all-gather", "all-gather 2", "reduce-scatter", "all-reduce", "optimizer"]
    for rank, plot in enumerate(figure.axes):
        assert plot.get_title(loc="left") == f"rank {rank}"
        assert [each.get_text() for each in plot.get_yticklabels()] == lanes
        boxes = [each.get_window_extent() for each in (*plot.texts, *plot.get_yticklabels())]
        assert len(plot.texts) > 5
        assert not [1 for i, box in enumerate(boxes) for each in boxes[:i] if box.overlaps(each)]
    assert main(["timeline", *paths, "-o", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_without_matplotlib_the_error_names_it(files, capsys):
    with mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None}):
        assert main(["timeline", *files(trace(*STEP)), "-o", "t.png"]) == 1
    assert "matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ([{}], "trace-0.json is no file of torch.profiler"),
        ([[]], "trace-0.json is no file of torch.profiler"),
        ([{"traceEvents": [{"ph": "X"}]}], "trace-0.json is no file of torch.profiler"),
        ([trace(event("aten::mm", 0, 1, "cpu_op"))], "shows no collective of meshard"),
        ([trace(*STEP), trace(*STEP)], "two of the files are of rank 0"),
    ],
)
def test_what_is_no_trace_is_refused(files, capsys, contents, text):
    assert main(["timeline", *files(*contents)]) == 1
    assert text in capsys.readouterr().err


def test_files_may_be_missing_or_compressed(files, tmp_path, capsys):
    assert main(["timeline", str(tmp_path / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err
    (path,) = files(trace(*STEP))
    with gzip.open(f"{path}.gz", "wt") as file:
        json.dump(trace(*STEP), file)
    assert printed(capsys, [f"{path}.gz"]) == printed(capsys, [path])
