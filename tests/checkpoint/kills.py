"""A save of two ranks that is killed at each of its acts on the disk.

    python -m tests.checkpoint.kills FOLDER SCENARIO

The first run records every write, sync, rename and unlink of both ranks. Then, for each of these,
two new processes save, and one of them ends by ``os._exit`` right before that act. What is left
must hold the newest checkpoint that was committed, whole, and the next save must succeed. Prints a
line for each point. Processes are forked from this one, which has imported torch.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

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


def built(value: int, *, is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
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

    def __init__(self, checkpointer: Checkpointer, last: int | None) -> None:
        storage = checkpointer._storage
        self.seen: list[str] = []
        self._last = last
        act, write = storage.act, storage.write
        storage.act = lambda what, *paths: (self._count(what, *paths), act(what, *paths))
        storage.write = lambda file, data: (self._count("write", file.name), write(file, data))

    def _count(self, what: str, *paths: object) -> None:
        if len(self.seen) == self._last:
            os._exit(KILLED)
        self.seen.append(" ".join([what, *(Path(str(path)).name for path in paths)]))


def save(
    rank: int, folder: Path, step: int, value: int, keep: int | None, last: int | None
) -> None:
    """Save on one of two ranks, and write down what was done."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    checkpointer = Checkpointer(folder / "run", keep=keep)
    acts = Acts(checkpointer, last)
    checkpointer.save(step, *built(value, is_sharded=True))
    checkpointer.wait()  # for the removal of old ones
    (folder / f"acts-{rank}.json").write_text(json.dumps(acts.seen))
    dist.destroy_process_group()


def on_two_ranks(
    folder: Path, step: int, value: int, keep: int | None, kill: tuple[int, int]
) -> int:
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


def check_newest(folder: Path, values: dict[int, set[int]]) -> int:
    """Load the newest checkpoint in one process; return its numbers, which are all the same."""
    checkpointer = Checkpointer(folder / "run")
    step = checkpointer.latest_step()
    assert step in values, step
    assert checkpointer.verify() == []
    model, optimizer = built(-1, is_sharded=False)
    checkpointer.load(model, optimizer)
    (value,) = {int(x) for each in values_of(model, optimizer).values() for x in each.flatten()}
    assert value in values[step], (step, value)
    assert_same_values(values_of(model, optimizer), values_of(*built(value, is_sharded=False)))
    return value


def main(folder: Path, scenario: str) -> int:
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
        shutil.rmtree(run)
        shutil.copytree(before, run)
        assert on_two_ranks(folder, step, 2, keep, (rank, number)) == 1
        is_committed = rank == 0 and number > committed
        expected: dict[int, set[int]] = {}
        expected.setdefault(first, set()).update(set() if is_committed else {1})
        expected.setdefault(step, set()).update({2} if is_committed else set())
        found = check_newest(folder, {key: each for key, each in expected.items() if each})
        on_two_ranks(folder, 3, 3, keep, (-1, 0))
        check_newest(folder, {3: {3}})
        assert all((path / "manifest.json").exists() for path in run.iterdir())
        print(f"rank {rank} before {acts[rank][number]!r}: the values of save {found}", flush=True)
    return len(points)


if __name__ == "__main__":
    print("points:", main(Path(sys.argv[1]), sys.argv[2]))
