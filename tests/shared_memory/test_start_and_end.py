"""Jobs of two ranks that start and end while the machine is busy.

``python -m tests.shared_memory.test_start_and_end FOLDER`` runs one job of each kind, all at once.
A rank is forked from a process that has imported torch, and ends with its interpreter like any
program: with exit code 0, and without a word.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshard
from tests import ROOT

ENDS = (
    "destroyed",
    "left",
    "gather in flight",
    "reduction in flight",
    "failed backward",
    "late thread",
)
KINDS = [(end, shared) for end in ENDS for shared in ("1", "0")]
SECONDS = 120


def train(end):
    """Take some steps as one rank, and return what lives until its interpreter ends."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for layer in (*model, model):
        meshard.fully_shard(layer)
    meshard.overlap_optimizer(model, torch.optim.AdamW, lr=1e-3)
    batch, handle = torch.ones(2, 64), None
    for _ in range(2):
        model(batch).sum().backward()
    if end == "destroyed":
        dist.destroy_process_group()
    elif end == "gather in flight":
        handle = model[1].unshard(async_op=True)
    elif end == "reduction in flight":
        model.set_manual_backward_finalization(True)
        model(batch).sum().backward()
    elif end == "failed backward":
        model[1].register_full_backward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(batch).sum().backward()
    elif end == "late thread":
        leave_tensors_to_gloo()
    return model, handle


def leave_tensors_to_gloo():
    """Begin a collective, and keep the GIL from gloo's thread, which needs it at the end."""
    sys.setswitchinterval(SECONDS)  # how long another thread waits until it is handed the GIL
    if dist.get_rank():
        time.sleep(0.5)  # so that the other rank has dropped the tensor before the end
    dist.all_reduce(torch.ones(1), async_op=True)
    done = time.monotonic() + 2
    while time.monotonic() < done:
        pass


def run_jobs(folder):
    """Fork all ranks and print how they ended; in a rank, return what is to be kept."""
    pids = []
    for end, shared in KINDS:
        for rank in range(2):
            pids.append(os.fork())
            if not pids[-1]:
                signal.alarm(SECONDS)
                output = os.open(folder / f"{end} {shared}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1), os.dup2(output, 2)
                os.environ["MESHARD_SHARED_MEMORY"] = shared
                store = dist.FileStore(f"{folder}/{end} {shared}, store", 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                return train(end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for job, (end, shared) in enumerate(KINDS):
        print((end, shared), codes[2 * job :][:2], repr((folder / f"{end} {shared}").read_text()))
    return None


@pytest.mark.slow
def test_every_rank_ends_cleanly(tmp_path):
    command = [sys.executable, "-m", __name__, tmp_path]
    environ = dict(os.environ, PYTHONFAULTHANDLER="1")
    done = subprocess.run(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{kind} [0, 0] ''" for kind in KINDS]


if __name__ == "__main__":
    import torch._dynamo  # the ranks need not import it

    kept = run_jobs(Path(sys.argv[1]))
