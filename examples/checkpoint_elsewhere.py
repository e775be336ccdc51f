"""Save on four ranks, go on on two, and compare with one process that was never stopped.

python examples/checkpoint_elsewhere.py

starts the three jobs one after the other. Each is this file under torchrun, as on a cluster:

torchrun --nproc-per-node 4 examples/checkpoint_elsewhere.py --out RUN --until 10
torchrun --nproc-per-node 2 examples/checkpoint_elsewhere.py --out RUN --until 20
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import fully_shard
from meshard.checkpoint import Checkpointer

STEPS, BATCH = 20, 16  # BATCH is that of all ranks together


def start() -> torch.device:
    """Join the ranks that torchrun has started; plain ``python`` is one rank."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def train(folder: Path, until: int, device: torch.device) -> None:
    """Train up to step ``until`` on any number of ranks, from the newest checkpoint on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    torch.manual_seed(0)  # every rank starts from the same values
    model = nn.Sequential(nn.Linear(16, 65), nn.Tanh(), nn.Linear(65, 1)).to(device)
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    # Each rank reads what it needs of the files, however many ranks have written them.
    checkpointer, first = Checkpointer(folder / "checkpoints"), 0
    if checkpointer.latest_step() is not None:
        first = checkpointer.load(model, optimizer, scheduler=scheduler).step or 0
    if rank == 0:
        print(f"{ranks} ranks on {device.type}: steps {first + 1} to {until}", flush=True)
    for step in range(first + 1, until + 1):
        # The batch of a step depends on the step alone, and each rank takes its rows.
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 16, generator=generator).chunk(ranks)[rank].to(device)
        loss = (model(x) - x[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(mean := loss.detach() / ranks)
        if rank == 0:
            with open(folder / "losses.jsonl", "a") as file:
                file.write(json.dumps([step, mean.item()]) + "\n")
    if until > first:
        checkpointer.save(until, model, optimizer, scheduler=scheduler)


def run(folder: Path, ranks: int, until: int) -> dict[int, float]:
    """Run this file under torchrun; return the losses in ``folder`` by step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = ["--nproc-per-node", str(ranks), __file__, "--out", str(folder), "--until", str(until)]
    subprocess.run([*torchrun, *flags], check=True)
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the run; default: one that is deleted")
    parser.add_argument("--until", type=int, default=STEPS, help="the last step of this job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if dist.is_torchelastic_launched():  # one rank of a job
            device = start()
            folders = [str(args.out or temporary)]
            dist.broadcast_object_list(folders)  # all ranks use the folder of the first
            Path(folders[0]).mkdir(parents=True, exist_ok=True)
            train(Path(folders[0]), args.until, device)
            dist.barrier()
            dist.destroy_process_group()
            return
        out = args.out or Path(temporary)
        run(out / "moved", ranks=4, until=STEPS // 2)
        moved = run(out / "moved", ranks=2, until=STEPS)
        alone = run(out / "alone", ranks=1, until=STEPS)
    for step in (1, STEPS // 2, STEPS // 2 + 1, STEPS):
        print(f"step {step:2}: loss {moved[step]:.6f} moved, {alone[step]:.6f} alone")
    apart = max(abs(moved[step] / alone[step] - 1) for step in alone)
    print(f"equal to one run: {'yes' if apart < 1e-4 else 'no'} (at most {apart:.0e} apart)")


if __name__ == "__main__":
    main()
