"""Training under a limit of memory in which whole optimizer state does not fit.

torchrun --nproc-per-node 4 examples/fit_a_budget.py            # state in parts: it trains
torchrun --nproc-per-node 4 examples/fit_a_budget.py --whole    # each rank has all of it: too much

Each rank holds the whole model, as with DDP: on a mesh of four replicas with one shard each. The
limit is set by the operating system (Linux), on CPU ranks. It is so much above what a process has
before the model is built that parameters, gradients and AdamW's two moments do not fit.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import clip_grad_norm_, fully_shard, local_optimizer

M_MMAP_THRESHOLD = -3  # of glibc
WIDTH, DEPTH, STEPS, BATCH = 1024, 12, 4, 8
PARAMS = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)  # bytes
BUDGET = int(3.9 * PARAMS)  # whole, parameters, gradients and two moments are 4 times PARAMS


def limit_memory(num_bytes: int) -> None:
    """Let this process take so much more memory than it has now."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed goes back to the system
    status = Path("/proc/self/status").read_text()
    now = 1024 * int(re.findall(r"VmData:\s+(\d+)", status)[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + num_bytes, resource.RLIM_INFINITY))


def train(*, over_replicas: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # every rank starts from the same values
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in model:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    optimizer = local_optimizer(model, torch.optim.AdamW, lr=1e-3, over_replicas=over_replicas)
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f} on the first rank", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="keep whole state on each rank")
    is_whole = parser.parse_args().whole
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{PARAMS / 2**20:.0f} MiB of parameters, a budget of {BUDGET / 2**20:.0f} MiB")
    limit_memory(BUDGET)
    try:
        train(over_replicas=not is_whole)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        if dist.get_rank() == 0:
            print("out of memory: state does not fit; leave out --whole", flush=True)
        os._exit(0)  # other ranks fail alike, and have no memory to end in order
    if dist.get_rank() == 0:
        print("it fits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
