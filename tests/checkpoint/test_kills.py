"""A save that is killed leaves the checkpoints before it, and the next save goes on.

    python -m tests.checkpoint.test_kills FOLDER SCENARIO

Two ranks save. The first run records every write, sync, rename and unlink of both. Then, for each
of these, two new processes save, and one of them ends by ``os._exit`` right before that act. What
is left must hold the newest checkpoint that was committed, and the next save must succeed. Prints a
line for each point. Processes are forked from this one, which has imported torch.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer
from tests.checkpoint.runs import assert_same_values, values_of

KILLED = 9
SECONDS = 60
# What is saved before, the step whose save is killed, and how many checkpoints are kept.
SCENARIOS = {"a new step": (1, 2, 1), "the same step again": (1, 1, None)}


def built(value, *, is_sharded):
    """Return a model and an optimizer, all of whose numbers are ``value``."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    if is_sharded:
        meshard.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            optimizer.state[param]["momentum_buffer"].fill_(value)
    return model, optimizer


class Acts:
    """Counts the acts of one rank on the disk, and ends the process before one of them."""

    def __init__(self, checkpointer, last):
        storage = checkpointer._storage
        self.seen = []
        self._last = last
        act, write = storage.act, storage.write
        storage.act = lambda what, *paths: (self._count(what, *paths), act(what, *paths))
        storage.write = lambda file, data: (self._count("write", file.name), write(file, data))

    def _count(self, what, *paths):
        if len(self.seen) == self._last:
            os._exit(KILLED)
        self.seen.append(" ".join([what, *(Path(str(path)).name for path in paths)]))


def save(rank, folder, step, value, keep, last):
    """Save on one of two ranks, and write down what was done."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    checkpointer = Checkpointer(folder / "run", keep=keep)
    acts = Acts(checkpointer, last)
    checkpointer.save(step, *built(value, is_sharded=True))
    checkpointer.wait()  # for the removal of old ones
    (folder / f"acts-{rank}.json").write_text(json.dumps(acts.seen))
    dist.destroy_process_group()


def on_two_ranks(folder, step, value, keep, kill):
    """Save in two new processes; return how many of them were killed as planned."""
    (folder / "store").unlink(missing_ok=True)
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.alarm(SECONDS)
            try:
                save(rank, folder, step, value, keep, kill[1] if kill[0] == rank else None)
                code = 0
            except Exception as error:
                if kill[0] < 0:
                    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if kill[0] < 0 and codes != [0, 0]:
        raise SystemExit(f"a save that nobody killed ended with {codes}")
    return codes.count(KILLED)


def check_newest(folder, step, value):
    """Load the newest checkpoint in one process, and compare."""
    checkpointer = Checkpointer(folder / "run")
    assert checkpointer.latest_step() == step
    assert checkpointer.verify() == []
    model, optimizer = built(-1, is_sharded=False)
    checkpointer.load(model, optimizer)
    assert_same_values(values_of(model, optimizer), values_of(*built(value, is_sharded=False)))


def main(folder, scenario):
    """Kill at each point; return their number."""
    first, step, keep = SCENARIOS[scenario]
    before, run = folder / "before", folder / "run"
    on_two_ranks(folder, first, 1, keep, (-1, 0))
    shutil.copytree(run, before)
    on_two_ranks(folder, step, 2, keep, (-1, 0))
    acts = [json.loads((folder / f"acts-{rank}.json").read_text()) for rank in range(2)]
    points = [(rank, number) for rank in range(2) for number in range(len(acts[rank]))]
    committed = max(n for n, act in enumerate(acts[0]) if act.startswith("rename"))
    for rank, number in points:
        print(f"rank {rank} before {acts[rank][number]!r}", flush=True)
        shutil.rmtree(run)
        shutil.copytree(before, run)
        assert on_two_ranks(folder, step, 2, keep, (rank, number)) == 1
        is_committed = rank == 0 and number > committed
        check_newest(folder, *((step, 2) if is_committed else (first, 1)))
        on_two_ranks(folder, 3, 3, keep, (-1, 0))
        check_newest(folder, 3, 3)
        assert all((path / "manifest.json").exists() for path in run.glob("step-*"))
    return len(points)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_act_on_the_disk_leaves_the_newest_checkpoint(tmp_path, scenario):
    command = [sys.executable, "-m", "tests.checkpoint.test_kills", str(tmp_path), scenario]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 30


def test_files_are_synced_before_the_manifest_appears_and_that_before_anything_goes(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, nn.Linear(1, 1))
    acts = Acts(checkpointer, None).seen
    checkpointer.save(2, nn.Linear(1, 1))
    checkpointer.wait()
    commit = acts.index("rename manifest.json.unfinished manifest.json")
    for file in (".meshard", "rank-00000.safetensors", "manifest.json.unfinished"):
        last = max(n for n, act in enumerate(acts) if act == f"write {file}")
        assert last < acts.index(f"sync {file}") < commit
    assert acts[commit - 1] == "sync step-2"
    assert acts[commit + 1 : commit + 3] == ["sync step-2", f"sync {tmp_path.name}"]
    assert acts[commit + 3] == "unlink manifest.json"
    assert not any(act.startswith("unlink") for act in acts[:commit])


if __name__ == "__main__":
    print("points:", main(Path(sys.argv[1]), sys.argv[2]))
