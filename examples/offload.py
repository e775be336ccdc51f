"""CPU offload: shards, gradients and optimizer state in host memory, and compute on the GPU.

python examples/offload.py                         # one process
torchrun --nproc-per-node 2 examples/offload.py    # each rank keeps a half in its host's memory

The same steps are taken with the shards on the device, and the losses compared. Where there is no
GPU the device is the host, so that nothing is saved, but all of it runs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import CPUOffloadPolicy, OffloadPolicy, clip_grad_norm_, fully_shard, microbatches

STEPS, MICROBATCHES, BATCH, WIDTH, DEPTH = 10, 2, 8, 512, 6  # BATCH is that of all ranks together


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


def train(policy: OffloadPolicy, device: torch.device) -> tuple[list[float], nn.Module]:
    """Return the losses, means over all ranks, and the model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    torch.manual_seed(0)  # every rank starts from the same values
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)  # on the host: no device has to hold the whole model
    for layer in model:
        fully_shard(layer, mesh, offload_policy=policy)  # moves the shards where they belong
    fully_shard(model, mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # steps where the shards are

    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batches = torch.randn(MICROBATCHES, BATCH, WIDTH, generator=generator)
        total = torch.zeros((), device=device)
        for batch in microbatches(model, batches):
            x = batch.chunk(ranks)[rank].to(device)  # the batch goes to the device, as ever
            loss = (model(x) - x.roll(1, dims=1)).square().mean() / MICROBATCHES
            loss.backward()
            total += loss.detach() / ranks
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, model


def main() -> None:
    device = start()
    is_cuda = device.type == "cuda"
    policies = {
        "on the device": OffloadPolicy(),
        "on the host": CPUOffloadPolicy(pin_memory=is_cuda),
    }
    losses: dict[str, list[float]] = {}
    for name, policy in policies.items():
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses[name], model = train(policy, device)
        lives_on = next(model.parameters()).device
        peak = f", at most {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB" if is_cuda else ""
        del model  # before the next one is measured
        if dist.get_rank() == 0:
            first, last = losses[name][0], losses[name][-1]
            print(f"{name:13}: loss {first:.5f} to {last:.5f}, shards on {lives_on}", end="")
            print(f", compute on {device}{peak}", flush=True)
    resident, offloaded = losses.values()
    apart = max(abs(a / b - 1) for a, b in zip(offloaded, resident, strict=True))
    if dist.get_rank() == 0:
        # The kernels of AdamW round differently on a GPU and on a host.
        print(f"equal losses: {'yes' if apart < 1e-4 else 'no'} (at most {apart:.0e} apart)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
