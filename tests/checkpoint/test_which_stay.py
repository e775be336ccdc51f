"""Which checkpoints a save takes for the newest, which it removes, and which it must not touch."""

import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import signal
import socket
import time

import pytest
import torch.distributed as dist
from torch import nn

from meshard.checkpoint import Checkpointer, CheckpointError
from meshard.checkpoint.__main__ import main as command
from tests.support.ranks import on_ranks


def model_of(value=0.0):
    model = nn.Linear(3, 2)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def save(folder, *steps, value=0.0, **options):
    """Save in a run of its own, and return the steps that are left."""
    checkpointer = Checkpointer(folder, **options)
    for step in steps:
        checkpointer.save(step, model_of(value))
    checkpointer.close()
    return checkpointer.steps()


def loaded_value(folder, **options):
    model = model_of(-1.0)
    step = Checkpointer(folder).load(model, **options).step
    assert len({each.item() for param in model.parameters() for each in param.flatten()}) == 1
    return step, model.weight[0, 0].item()


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- links -----------------------------------------------------------------------------------


def test_a_checkpoint_behind_a_link_is_neither_pruned_nor_emptied_and_can_be_loaded(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, 600, 700, 800, 900)
    save(first, 1000, value=5.0)
    before = contents(first)
    second.mkdir()
    (second / "step-1000").symlink_to(first / "step-1000")
    assert loaded_value(second) == (1000, 5.0)
    left = save(second, 1001, 1002, keep=1)
    assert contents(first) == before
    assert left == [1000, 1002]
    assert Checkpointer(second, keep=1).prune() == []
    assert command(["prune", str(second), "--keep", "1"]) == 0
    assert contents(first) == before and (second / "step-1000").is_symlink()
    assert Checkpointer(first).verify(1000) == []
    assert loaded_value(second, step=1000) == (1000, 5.0)


def test_what_is_saved_beside_a_link_to_a_run_with_more_commits_is_the_newest(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, *range(10))
    save(second, 2, value=1.0)
    (second / "step-9").symlink_to(first / "step-9")
    save(second, 3, value=2.0)
    assert loaded_value(second) == (3, 2.0)
    before = contents(first)
    save(second, 9, value=3.0)  # under the name of the link
    assert loaded_value(second) == loaded_value(second, step=9) == (9, 3.0)
    assert contents(first) == before and (second / "step-9").is_symlink()


def test_what_is_unfinished_behind_a_link_is_not_removed(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    save(other, 5)
    (other / "step-5" / "manifest.json").unlink()  # as if its job were still writing
    empty = tmp_path / "empty"
    empty.mkdir()
    run.mkdir()
    (run / "step-5").symlink_to(other / "step-5")
    (run / "step-6").symlink_to(empty)
    (run / "step-7").symlink_to(tmp_path / "nowhere")
    before = contents(other)
    assert before
    assert save(run, 8, 9, keep=1) == [9]
    assert contents(other) == before and empty.is_dir()
    links = sorted(path.name for path in run.iterdir() if path.is_symlink())
    assert links == ["step-5", "step-6", "step-7"]


def test_a_file_or_folder_behind_a_link_inside_of_a_checkpoint_stays(tmp_path):
    run, notes = tmp_path / "run", tmp_path / "notes"
    save(run, 1)
    notes.mkdir()
    (notes / "mine.txt").write_text("mine")
    largest = max((run / "step-1").iterdir(), key=lambda path: path.stat().st_size)
    data = shutil.move(largest, tmp_path / "on another disk")
    largest.symlink_to(data)
    (run / "step-1" / "notes").symlink_to(notes)
    before = data.read_bytes()
    assert loaded_value(run) == (1, 0.0)
    assert save(run, 2, keep=1) == [2]
    assert data.read_bytes() == before and (notes / "mine.txt").read_text() == "mine"


def test_a_run_whose_own_folder_is_a_link_is_pruned_as_any_other(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    assert save(link, 1, 2, 3, keep=1) == [3]
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["step-3"]


# --- the newest ------------------------------------------------------------------------------


def test_after_rolling_back_the_newest_is_the_last_that_was_committed(tmp_path):
    run = tmp_path / "run"
    save(run, 300, 400, 500, value=1.0)
    checkpointer = Checkpointer(run, keep=3)
    checkpointer.load(model_of(), step=300)
    for step in (310, 320, 330):
        checkpointer.save(step, model_of(2.0))
        assert checkpointer.latest_step() == step
    checkpointer.close()
    assert checkpointer.steps() == [310, 320, 330]
    assert loaded_value(run) == (330, 2.0)


def test_a_step_that_is_saved_again_after_rolling_back_is_the_newest(tmp_path):
    run = tmp_path / "run"
    save(run, 300, 400, 500, value=1.0)
    assert save(run, 400, value=2.0) == [300, 400, 500]
    assert loaded_value(run) == (400, 2.0)
    assert loaded_value(run, step=500) == (500, 1.0)
    assert Checkpointer(run).manifest().step == 400
    assert Checkpointer(run, keep=2).prune() == [300]
    assert command(["prune", str(run), "--keep", "1"]) == 0
    assert Checkpointer(run).steps() == [400]


def test_the_order_of_commits_is_not_that_of_dates_and_lives_through_a_copy(tmp_path):
    run, copied = tmp_path / "run", tmp_path / "copied"
    save(run, 300, 400, 310, 320)
    for path in (run / "step-320", *(run / "step-320").iterdir()):
        os.utime(path, (0, 0))
    assert Checkpointer(run).latest_step() == 320
    copied.mkdir()
    for name in ("step-320", "step-310", "step-300", "step-400"):
        shutil.copytree(run / name, copied / name)
    assert Checkpointer(copied).latest_step() == 320
    assert save(copied, 330, keep=2) == [320, 330]


@on_ranks(2)
def test_all_ranks_load_the_last_that_was_committed(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (400, 310):
        checkpointer.save(step, model_of(step))
    model = model_of()
    assert checkpointer.load(model).step == 310
    assert model.weight.unique().tolist() == [310]


# --- keep, keep_every, keep_best, save_every -------------------------------------------------


def test_by_default_nothing_is_removed(tmp_path):
    assert save(tmp_path, *range(6)) == [*range(6)]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(9, model_of(), metric=1.0)
    assert checkpointer.prune() == []
    assert checkpointer.steps() == [*range(6), 9]


def test_the_newest_and_multiples_stay(tmp_path):
    assert save(tmp_path / "a", 1, 2, 3, keep=2) == [2, 3]
    assert save(tmp_path / "b", 5, 10, 15, 20, 25, keep=1, keep_every=10) == [10, 20, 25]


METRICS = {1: 5.0, 2: 1.0, 3: 3.0, 4: 2.0, 5: 4.0}


@pytest.mark.parametrize(
    ("best", "num_best", "keep", "expected"),
    [
        ("min", 2, 1, [2, 4, 5]),
        ("max", 2, 1, [1, 5]),
        ("max", 1, 1, [1, 5]),
        ("min", 1, 2, [2, 4, 5]),
        ("min", 9, 1, [1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_the_best_stay_beside_the_newest(tmp_path, best, num_best, keep, expected, background):
    for step, metric in METRICS.items():  # each in a run that has begun anew
        checkpointer = Checkpointer(tmp_path, keep=keep, keep_best=num_best, best=best)
        if background:
            checkpointer.async_save(step, model_of(), metric=metric).wait()
        else:
            checkpointer.save(step, model_of(), metric=metric)
        checkpointer.close()
    assert Checkpointer(tmp_path).steps() == expected
    assert Checkpointer(tmp_path).latest_step() == 5


def test_what_has_no_metric_or_one_that_is_no_number_is_not_among_the_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best=1)
    for step, metric in enumerate([None, 3.0, float("nan"), float("inf"), None]):
        checkpointer.save(step, model_of(), metric=metric)
    checkpointer.close()
    assert checkpointer.steps() == [1, 4]


def test_a_metric_is_that_of_the_last_save_of_a_step(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best=1)
    for step, metric in ((1, 1.0), (2, 2.0), (1, 3.0), (3, 4.0)):
        checkpointer.save(step, model_of(), metric=metric)
    checkpointer.close()
    # When step 1 was saved anew, step 2 was the best; it is still.
    assert checkpointer.steps() == [2, 3]


@on_ranks(2)
def test_only_multiples_of_save_every_are_saved_unless_forced(tmp_path):
    checkpointer, model = Checkpointer(tmp_path, save_every=100), model_of()
    for step in (99, 100, 101):
        checkpointer.save(step, model)
    assert checkpointer.steps() == [100]
    handles = [checkpointer.async_save(step, model) for step in (199, 200, 201)]
    for handle in handles:
        handle.wait()
    assert all(handle.done() for handle in handles)
    assert checkpointer.steps() == [100, 200]
    checkpointer.save(250, model, force=True)
    checkpointer.async_save(251, model, force=True).wait()
    assert checkpointer.steps() == [100, 200, 250, 251]
    everything = Checkpointer(tmp_path / "other")
    everything.save(7, model)
    assert everything.steps() == [7]


@pytest.mark.parametrize("options", [
    {"keep": 0}, {"keep_every": 0, "keep": 1}, {"keep_best": 0, "keep": 1}, {"save_every": 0},
    {"best": "low", "keep": 1}, {"keep_every": 2}, {"keep_best": 2},
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(tmp_path, options):
    """Such as what stays beside the newest ones, where nothing is removed."""
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        Checkpointer(tmp_path, **options)


# --- one saver for each folder ---------------------------------------------------------------


def refused_by(pid):
    who = rf"(?s)another job .*process {pid} on {re.escape(socket.gethostname())}\b"
    return pytest.raises(CheckpointError, match=who)


def test_a_second_checkpointer_of_one_process_is_refused_until_the_first_is_closed(tmp_path):
    first, second, model = Checkpointer(tmp_path), Checkpointer(tmp_path), model_of()
    first.save(1, model)
    with refused_by(os.getpid()):
        second.save(2, model)
    with refused_by(os.getpid()):
        second.async_save(2, model).wait()
    assert (second.load(model).step, second.steps()) == (1, [1])
    first.save(3, model)
    first.close()
    second.save(2, model)
    with refused_by(os.getpid()):
        first.save(4, model)
    assert first.steps() == [1, 2, 3]


def test_a_checkpointer_that_is_gone_or_only_loads_holds_nothing(tmp_path):
    model = model_of()
    save(tmp_path, 1)
    reader, first = Checkpointer(tmp_path), Checkpointer(tmp_path)
    reader.load(model)
    first.save(2, model)
    del first
    gc.collect()
    last = Checkpointer(tmp_path)
    last.save(3, model)
    assert last.steps() == reader.steps() == [1, 2, 3]


def test_close_waits_for_a_save_in_the_background(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    handle = first.async_save(1, nn.Linear(2000, 2000))
    first.close()
    assert handle.done() and first.steps() == [1]
    second.save(2, model_of())


def test_a_folder_that_is_reached_on_two_ways_is_one_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first, second = Checkpointer(tmp_path / "run"), Checkpointer(tmp_path / "link")
    first.save(1, model_of())
    with refused_by(os.getpid()):
        second.save(2, model_of())


@on_ranks(2)
def test_all_ranks_of_a_second_job_are_refused(tmp_path):
    first, second, model = Checkpointer(tmp_path), Checkpointer(tmp_path), model_of()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    first.save(1, model)
    with refused_by(pids[0]):
        second.save(2, model)
    first.close()
    second.save(2, model)
    assert second.steps() == [1, 2]


@on_ranks(2)
def test_of_two_jobs_that_save_at_the_same_time_what_was_acknowledged_is_there(tmp_path):
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    checkpointer = Checkpointer(tmp_path, process_group=groups[rank])
    acknowledged, refused = [], 0
    dist.barrier()
    for number in range(20):
        step = 2 * number + rank
        try:
            checkpointer.save(step, model_of(step))
            acknowledged.append(step)
        except CheckpointError as error:
            refused += "another" in str(error)
    told = [None, None]
    dist.all_gather_object(told, (acknowledged, refused))
    assert checkpointer.steps() == sorted(step for steps, _ in told for step in steps)
    assert sorted(refused for _, refused in told) == [0, 20]
    for step in checkpointer.steps():
        model = model_of()
        checkpointer.load(model, step=step)
        assert model.weight.unique().tolist() == [step]


# --- owners that end ---------------------------------------------------------------------------

FORK = multiprocessing.get_context("forkserver")
SECONDS = 60


def own_and_sleep(folder, connection, seconds_of_child):
    """Save, perhaps fork a process that sleeps so long, and sleep."""
    signal.alarm(SECONDS)
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model_of())
    child = 0
    if seconds_of_child is not None:
        child = os.fork()
        if not child:
            del checkpointer  # its copy
            gc.collect()
            time.sleep(seconds_of_child)
            os._exit(0)
        if not seconds_of_child:
            os.waitpid(child, 0)
    connection.send(child)
    time.sleep(SECONDS)
    checkpointer.close()


@contextlib.contextmanager
def owner(folder, seconds_of_child=None):
    """Run another job that has saved into a folder; yield its process and the id of its child."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(
        target=own_and_sleep, args=(str(folder), theirs, seconds_of_child), daemon=True
    )
    process.start()
    theirs.close()
    child = 0
    try:
        assert ours.poll(SECONDS), "the other job did not start"
        child = ours.recv()
        yield process, child
    finally:
        process.kill()
        process.join()
        if child and seconds_of_child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_another_job_that_lives_is_named_and_one_that_was_killed_leaves_no_lock(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with owner(tmp_path) as (process, _):
        with refused_by(process.pid):
            checkpointer.save(2, model_of())
        assert checkpointer.steps() == [1]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        checkpointer.save(2, model_of())
    assert checkpointer.steps() == [1, 2]


def test_a_forked_child_that_outlives_its_parent_does_not_hold_the_lock(tmp_path):
    """As workers of a data loader are, which the kernel may let live on."""
    checkpointer = Checkpointer(tmp_path)
    with owner(tmp_path, SECONDS) as (process, child):
        with refused_by(process.pid):
            checkpointer.save(2, model_of())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        os.kill(child, 0)  # it lives
        checkpointer.save(2, model_of())


def test_a_forked_child_that_ends_does_not_release_the_lock_of_its_parent(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with owner(tmp_path, 0) as (process, _), refused_by(process.pid):
        checkpointer.save(2, model_of())
    checkpointer.save(2, model_of())


def test_a_lock_that_a_killed_job_has_left_on_a_copy_refuses_nothing(tmp_path):
    run, copied = tmp_path / "run", tmp_path / "copied"
    first = Checkpointer(run)
    first.save(1, model_of())
    shutil.copytree(run, copied)  # with the file of the lock
    second = Checkpointer(copied)
    second.save(2, model_of())
    assert second.steps() == [1, 2]
    assert loaded_value(copied) == (2, 0.0)
