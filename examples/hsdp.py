"""HSDP: shard inside a node, replicate across nodes, and reduce across nodes once per step.

python examples/hsdp.py                         # one process
torchrun --nproc-per-node 4 examples/hsdp.py    # two replicas of two shards

It prints which rows of a weight each rank holds, and what one step of four microbatches sends
for each way to accumulate gradients. The loss is that of one process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from meshard import CommLedger, GradientSync, fully_shard, microbatches

STEPS, MICROBATCHES, BATCH, WIDTH = 5, 4, 8, 512  # BATCH is that of all ranks together


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


def make_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh (replicate, shard): two replicas where the number of ranks is even."""
    ranks = dist.get_world_size()
    replicas = 2 if ranks % 2 == 0 else 1  # on a cluster: the number of nodes
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=names)


def train(mesh: DeviceMesh, device: torch.device, mode: GradientSync) -> tuple[float, CommLedger]:
    """Return the last loss, the mean over all ranks, and what the last step sent."""
    torch.manual_seed(0)  # every rank starts from the same values
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]).to(device)
    for layer in model[:3]:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)

    generator = torch.Generator().manual_seed(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()  # replicas have different data too
    for _ in range(STEPS):
        batches = torch.randn(MICROBATCHES, BATCH, WIDTH, generator=generator)
        total = torch.zeros((), device=device)
        with CommLedger(model) as ledger:
            # Sets how far each backward reduces: the last one always does in full.
            for batch in microbatches(model, batches, until_last=mode):
                x = batch.chunk(ranks)[rank].to(device)
                loss = (model(x) - x.roll(1, dims=1)).square().mean() / MICROBATCHES
                loss.backward()
                total += loss.detach() / ranks
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    if mode is GradientSync.REDUCE_SCATTER:
        print_rows(mesh, model.get_parameter("0.weight"))
    return total.item(), ledger


def print_rows(mesh: DeviceMesh, weight: torch.Tensor) -> None:
    """Print which rows of ``weight`` each rank holds."""
    assert isinstance(weight, DTensor)
    replica, shard = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    rows = len(weight.to_local())
    line = f"replica {replica}, shard {shard}: rows {shard * rows} to {(shard + 1) * rows - 1}"
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print("\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines)))


def main() -> None:
    device = start()
    mesh = make_mesh(device)
    # REDUCE_SCATTER is the default of `microbatches`: gradients cross between replicas once.
    for mode in (GradientSync.REDUCE_SCATTER, GradientSync.NONE, GradientSync.FULL):
        loss, ledger = train(mesh, device, mode)
        if dist.get_rank() == 0:
            calls = ", ".join(f"{count} {op}" for op, count in ledger.counts.items())
            sent = f"{ledger.wire_bytes / 2**20:.0f} MiB ({calls or 'nothing'})"
            print(f"until the last {mode.name:14}: loss {loss:.5f}, sent per step {sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
