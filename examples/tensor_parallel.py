"""Tensor parallelism and FSDP on one mesh: pairs of ranks share each matrix product.

python examples/tensor_parallel.py                         # one process
torchrun --nproc-per-node 4 examples/tensor_parallel.py    # 2 x 2: two shards, each of two ranks

Each step is compared with the same model in one process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshard import clip_grad_norm_, fully_shard

STEPS, BATCH, WIDTH, DEPTH = 10, 16, 64, 3  # BATCH is that of all ranks together


class MLP(nn.Module):
    """A residual block: its two products can be shared out by columns, then by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def build(device: torch.device) -> nn.Sequential:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[MLP() for _ in range(DEPTH)]).to(device)


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


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, dims=1)).square().mean()


def main() -> None:
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tp = 2 if ranks % 2 == 0 else 1  # on a cluster: at most the GPUs of a node
    mesh = init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))

    model = build(device)
    for block in model:
        # Tensor parallelism first: one all-reduce over `tp` per block, in `down`.
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh["dp"])  # then what each rank of `tp` holds is sharded over `dp`
    fully_shard(model, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    alone = build(device)  # for the comparison only: the whole model and the whole batch
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)

    dp_ranks, dp_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    apart = 0.0
    for step in range(STEPS):
        whole = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        # Ranks along `tp` work on the same rows; the rows are shared out over `dp`.
        loss = loss_of(model, whole.chunk(dp_ranks)[dp_rank])
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)  # over both axes
        optimizer.step()
        optimizer.zero_grad()

        alone_loss = loss_of(alone, whole)
        alone_loss.backward()
        alone_norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        alone_optimizer.step()
        alone_optimizer.zero_grad()

        dist.all_reduce(mean := loss.detach() / dp_ranks, group=mesh["dp"].get_group())
        apart = max(apart, abs(mean / alone_loss - 1).item(), abs(norm / alone_norm - 1).item())
        if rank == 0 and step % 3 == 0:
            print(f"step {step}: loss {mean.item():.5f}, in one process {alone_loss.item():.5f}")

    weight = model.get_parameter("0.up.weight")
    assert isinstance(weight, DTensor)
    if rank == 0:
        print(f"mesh {ranks // tp} x {tp} (dp x tp) on {device.type}")
        print(f"a weight of shape {tuple(weight.shape)} is {weight.placements} on {mesh}")
        print(f"each rank holds {tuple(weight.to_local().shape)} of it")
        same = "yes" if apart < 1e-4 else "no"
        print(f"equal to one process: {same} (losses and norms at most {apart:.0e} apart)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
