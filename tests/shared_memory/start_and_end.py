"""Starts and ends of a job of two ranks, while other processes load the machine.

``python -m tests.shared_memory.start_and_end 200`` runs that many jobs and prints how many of each
kind were clean: both ranks end with exit code 0 and write nothing. A rank is forked from a process
that has imported torch, and goes through the end of its interpreter like any program.
"""

import argparse
import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# How the ranks end after some steps, and whether they share memory.
KINDS = [
    (end, shared)
    for end in ("destroyed", "left", "gather in flight", "reduction in flight", "failed backward")
    for shared in ("1", "0")
]
SECONDS = 120
ROOT = Path(__file__).parents[2]


def train(rank: int, store: Path, end: str) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import meshard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    meshard.overlap_optimizer(model, torch.optim.AdamW, lr=1e-3)
    batch = torch.ones(2, 64)
    for _ in range(2):
        model(batch).sum().backward()
    if end == "gather in flight":
        globals()["handle"] = model[1].unshard(async_op=True)
    elif end == "reduction in flight":
        model.set_is_last_backward(False)
        model(batch).sum().backward()
    elif end == "failed backward":
        model[1].register_full_backward_hook(fail)
        with contextlib.suppress(RuntimeError):
            model(batch).sum().backward()
    globals()["model"] = model  # lives until the interpreter ends
    if end == "destroyed":
        dist.destroy_process_group()


def fail(*_: object) -> None:
    raise RuntimeError("a hook fails")


def run_jobs(count: int, folder: Path) -> bool:
    """Fork and await the ranks of ``count`` jobs; return whether this process is such a rank."""
    import torch._dynamo  # noqa: F401 (the ranks need not import it)

    import meshard  # noqa: F401

    for number in range(count):
        end, shared = KINDS[number % len(KINDS)]
        output, pids = folder / f"output{number}", list[int]()
        for rank in range(2):
            pids.append(os.fork())
            if not pids[-1]:
                file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.environ["MESHARD_SHARED_MEMORY"] = shared
                train(rank, folder / f"store{number}", end)
                return True
        codes = [exit_code(pid) for pid in pids]
        text = output.read_text()
        outcome = f"exit codes {codes}, {text!r}" if any(codes) or text else "clean"
        print(f"{end}, MESHARD_SHARED_MEMORY={shared}: {outcome}", flush=True)
    return False


def exit_code(pid: int) -> int:
    """Wait for a process to end; kill it if that takes too long."""
    until = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, 9)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.01)


@contextlib.contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Keep ``num_processes`` busy."""
    busy = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(busy) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outcomes(count: int, num_busy: int) -> dict[str, int]:
    """Run ``count`` jobs, all kinds in turn; return how often each outcome occurred."""
    environ = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONFAULTHANDLER="1")
    with tempfile.TemporaryDirectory() as folder, load(num_busy):
        command = [sys.executable, "-m", "tests.shared_memory.start_and_end", str(count), folder]
        lines = subprocess.run(
            command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
    return dict(collections.Counter(lines.stdout.splitlines()))


def main() -> None:
    """Run the jobs that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--busy", type=int, default=4, help="processes that load the machine")
    options = parser.parse_args()
    if options.folder is not None:
        run_jobs(options.count, options.folder)
        return
    for outcome, count in outcomes(options.count, options.busy).items():
        print(f"{count:4} {outcome}")


if __name__ == "__main__":
    main()
