"""Muon on sharded matrices: one rank steps each, as a whole, with the numbers of one process.

python examples/muon.py --plot muon.png                         # one process
torchrun --nproc-per-node 2 examples/muon.py --plot muon.png    # each rank owns half of the work

A small transformer learns the text of Python's own help, byte by byte, once with AdamW and once
with Muon for the matrices of its layers. The picture shows both losses.
"""

from __future__ import annotations

import argparse
import copy
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshard import describe, fully_shard, owner_optimizer

BATCH, CONTEXT, WIDTH, DEPTH = 16, 64, 128, 3  # BATCH is that of all ranks together


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


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(x)


def train(name: str, device: torch.device, steps: int) -> list[float]:
    """Return the losses, means over all ranks."""
    torch.manual_seed(0)  # every rank starts from the same values
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizers: list[torch.optim.Optimizer] = []
    rest = dict(model.named_parameters())
    if name == "Muon":  # steps the matrices of the layers, and AdamW all else
        matrices = owner_optimizer(model, torch.optim.Muon, lr=0.02)
        rest = {fqn: param for fqn, param in rest.items() if fqn not in matrices.owners}
        optimizers.append(matrices)
        if dist.get_rank() == 0:
            print(next(line for line in describe(model).splitlines() if "Muon" in line), flush=True)
    optimizers.append(torch.optim.AdamW(rest.values(), lr=3e-3))
    schedulers = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.1, steps) for each in optimizers]

    data = torch.tensor(list("".join(topics.values()).encode()))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        begins = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([data[begin : begin + CONTEXT + 1] for begin in begins.tolist()])
        batch = batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        dist.all_reduce(total := loss.detach() / dist.get_world_size())
        losses.append(total.item())
    return losses


def draw(losses: dict[str, list[float]], path: str) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 3.5), layout="constrained")).add_subplot()
    for name, each in losses.items():
        axes.plot(range(1, len(each) + 1), each, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A transformer on Python's help")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", help="the file to draw into")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    args, device = parser.parse_args(), start()
    losses = {name: train(name, device, args.steps) for name in ("AdamW", "Muon")}
    if dist.get_rank() == 0:
        for name, each in losses.items():
            print(f"{name:5}: loss {each[0]:.3f} to {sum(each[-10:]) / 10:.3f} (mean of ten steps)")
        if args.plot is not None:
            draw(losses, args.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
