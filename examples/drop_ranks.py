"""Leave ranks out of a step whose loss is not finite, with a reduce hook.

python examples/drop_ranks.py                         # one process, and nothing to leave out
torchrun --nproc-per-node 4 examples/drop_ranks.py

In the third step ranks 1 and 3 get a broken batch, whose loss is NaN. A reduce hook replaces their
gradients by zeros and averages over the ranks that are left.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import fully_shard, register_reduce_hook

STEPS, BROKEN_STEP, BROKEN_RANKS = 4, 2, (1, 3)


class DropRanks:
    """A reduce hook that averages gradients over the ranks whose loss is finite."""

    def __init__(self) -> None:
        self.factor = 1.0  # for the gradients of this rank; 0: they are dropped

    def decide(self, loss: Tensor) -> int:
        """Return the number of ranks with a finite loss. Call it before each backward.

        **Collective:** all ranks.
        """
        is_finite = torch.isfinite(loss.detach()).float()
        count = is_finite.clone()
        dist.all_reduce(count)
        self.factor = is_finite.item() * dist.get_world_size() / max(count.item(), 1.0)
        return int(count)

    def arrived(self, unsharded: Tensor) -> None:
        """Change the gradients of one backward before they are added to anything."""
        if self.factor:
            unsharded.mul_(self.factor)
        else:
            unsharded.zero_()  # not mul_(0), which keeps a NaN


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


def batch(step: int, rank: int) -> Tensor:
    """Return the batch of one rank: ``[8, 16]``, NaN where it is broken."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 16, generator=generator)
    return x * float("nan") if step == BROKEN_STEP and rank in BROKEN_RANKS else x


def reference_gradient(weight: Tensor, step: int) -> Tensor:
    """Return the mean gradient over the ranks that are not broken, without sharding."""
    plain = nn.Linear(16, 1, bias=False)
    plain.weight = nn.Parameter(weight.clone())
    batches = [batch(step, rank) for rank in range(dist.get_world_size())]
    left = [x for x in batches if x.isfinite().all()]
    for x in left:
        (plain(x).square().mean() / len(left)).backward()
    gradient = plain.weight.grad
    assert gradient is not None
    return gradient


def main() -> None:
    device = start()
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = fully_shard(nn.Linear(16, 1, bias=False).to(device), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drop = DropRanks()
    register_reduce_hook(model, drop)
    for step in range(STEPS):
        weight = model.weight.full_tensor().detach().cpu()
        loss = model(batch(step, dist.get_rank()).to(device)).square().mean()
        num_left = drop.decide(loss)
        loss.backward()
        gradient = model.weight.grad.full_tensor().cpu()
        is_right = torch.allclose(gradient, reference_gradient(weight, step), atol=1e-6)
        if not dist.get_rank():
            print(f"step {step}: mean over {num_left} ranks, as without sharding: {is_right}")
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
