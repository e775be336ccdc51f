"""FSDP: shard a small transformer over all ranks and train it on bytes of text.

python examples/fsdp.py                         # one process
torchrun --nproc-per-node 2 examples/fsdp.py    # each rank holds a half

The losses are those of one process, up to rounding.
"""

from __future__ import annotations

import os
import pydoc_data.topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshard import CommLedger, clip_grad_norm_, fully_shard

STEPS, BATCH, CONTEXT, WIDTH, DEPTH = 30, 8, 64, 128, 4  # BATCH is that of all ranks together


class Transformer(nn.Module):
    """Predicts each next byte. Nothing in it knows about ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens`` [batch, time] to logits [batch, time, 256]."""
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        hidden = self.embed(tokens) + self.position(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


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


def batch(text: Tensor, step: int) -> Tensor:
    """Return this rank's rows of the batch of ``step``, which depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return rows.chunk(dist.get_world_size())[dist.get_rank()].long()


def main() -> None:
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))

    torch.manual_seed(0)  # every rank starts from the same values
    model = Transformer().to(device)
    whole = sum(param.nbytes for param in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh)  # one unit per block: gathered for its own forward and backward
    fully_shard(model, mesh)  # the rest: embeddings and head
    # The optimizer is built after sharding, so that its state is sharded too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)

    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))
    with CommLedger() as ledger:
        for step in range(STEPS):
            tokens = batch(text, step).to(device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # gradients are averaged over the ranks on the way
            clip_grad_norm_(model, 1.0)  # by the norm of the whole gradient
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == STEPS - 1:
                # Only the logged number needs a collective of its own.
                dist.all_reduce(mean := loss.detach() / ranks)
                if rank == 0:
                    print(f"step {step:2}: loss {mean.item():.4f}", flush=True)

    params = [param for param in model.parameters() if isinstance(param, DTensor)]
    held = sum(param.to_local().nbytes for param in params)
    if rank == 0:
        print(f"{ranks} ranks on {device.type}")
        print(f"parameters: {held / 2**20:.2f} of {whole / 2**20:.2f} MiB on the first rank")
        calls = ", ".join(f"{count // STEPS} {op}" for op, count in ledger.counts.items())
        print(f"sent: {ledger.wire_bytes / STEPS / 2**20:.2f} MiB per step ({calls or 'nothing'})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
