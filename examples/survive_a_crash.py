"""A run that loses a rank in the middle of a save: ``python examples/survive_a_crash.py``.

It starts ``torchrun --max-restarts 1`` twice. In the first run rank 1 is killed while it writes a
checkpoint; torchrun starts the ranks again, and they go on from the checkpoint before. The second
run is left alone. The losses are the same; ``--out x.png`` draws both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer

STEPS, SAVE_EVERY, CRASH_AT = 40, 10, 20


def train(folder: Path, *, crashes: bool) -> None:
    """Train on each rank, and go on from the newest checkpoint in ``folder``."""
    torch.manual_seed(0)  # every rank builds the same model
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    meshard.fully_shard(model)
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(1 + rank)  # every rank has its own data and dropout
    checkpointer, first_step = Checkpointer(folder / "checkpoints"), 0
    if checkpointer.latest_step() is not None:
        loaded = checkpointer.load(model, optimizer, scheduler=scheduler)
        first_step = loaded.step or 0
        if rank == 0:
            print(f"going on from step {first_step}", flush=True)
    for step in range(first_step + 1, STEPS + 1):
        x = torch.randn(64, 16)  # the state of the generator is in the checkpoint too
        loss = (model(x) - x[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            with open(folder / "losses.jsonl", "a") as file:
                file.write(json.dumps([step, loss.item() / dist.get_world_size()]) + "\n")
        if step % SAVE_EVERY == 0:
            if crashes and step == CRASH_AT and rank == 1:
                die_when_a_file_is_synced()
            checkpointer.save(step, model, optimizer, scheduler=scheduler)


def die_when_a_file_is_synced() -> None:
    """Kill this process when its part of the checkpoint is written, but not safe yet."""

    def die(_: object) -> None:
        print(f"rank 1 dies in the middle of the save of step {CRASH_AT}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die  # type: ignore[assignment]  # it never returns


def run(folder: Path, *, crashes: bool) -> list[tuple[int, float]]:
    """Run under torchrun; return the losses, of repeated steps the last."""
    folder.mkdir()
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, __file__]
    # Ranks that are started again would find the addresses of those before in a store that torchrun
    # shares with them, and gloo would call these.
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run([*command, str(folder), str(int(crashes))], check=True, env=env)
    lines = (folder / "losses.jsonl").read_text().splitlines()
    rows: list[tuple[int, float]] = [json.loads(line) for line in lines]
    return sorted(dict(rows).items())


def draw(
    crashed: list[tuple[int, float]], undisturbed: list[tuple[int, float]], path: Path
) -> None:
    """Draw the losses of both runs."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 3.5), layout="constrained")).subplots()
    axes.plot(*zip(*undisturbed, strict=True), lw=5, color="0.8", label="left alone")
    axes.plot(*zip(*crashed, strict=True), lw=1.2, color="C3", label="rank 1 killed, resumed")
    axes.axvline(CRASH_AT, ls=":", color="C3", label="killed while saving")
    axes.set(xlabel="step", ylabel="loss", title="A run that loses a rank in the middle of a save")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        train(Path(sys.argv[1]), crashes=sys.argv[2] == "1" and first_attempt)
        dist.destroy_process_group()
        return
    parser = argparse.ArgumentParser(description="Lose a rank in the middle of a save, and go on.")
    parser.add_argument("--out", type=Path, help="draw the losses of both runs here")
    picture = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        crashed = run(Path(folder) / "crashed", crashes=True)
        undisturbed = run(Path(folder) / "undisturbed", crashes=False)
    same = "yes" if crashed == undisturbed else "no"
    print(f"the losses are those of a run that did not crash, bit for bit: {same}")
    if picture:
        draw(crashed, undisturbed, picture)


if __name__ == "__main__":
    main()
