"""Plans of published models, before any GPU is there: do they fit, and what do they send?

python examples/plan_models.py                # GPT of 13 B on 8 ranks, 175 B on 128, 1 T on 256

Other models and settings, from this folder:

python -m meshard plan plan_models:job --world 64 --set name=llama:70b --fit 80GB
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import meshard
from meshard.planning import plan


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a transformer.

    ``hidden`` is that of the MLP, and ``kv_heads`` that of keys and values. A *gated* MLP has a
    third matrix, and such models have neither biases nor learned positions, as Llama.
    """

    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    is_tied: bool
    is_gated: bool


def gpt(width: int, depth: int, heads: int, vocab: int = 50257) -> Shape:
    return Shape(width, depth, heads, heads, 4 * width, vocab, is_tied=True, is_gated=False)


def llama(width: int, depth: int, heads: int, hidden: int) -> Shape:
    return Shape(width, depth, heads, 8, hidden, 128256, is_tied=False, is_gated=True)


# GPT: table 2.1 of Brown et al., 2020, where 13b has width 5140, which 40 heads of 128 do not fill.
# GPT 1t: table 1 of Narayanan et al., 2021. Llama 3.1: table 3 of Grattafiori et al., 2024. The
# vocabularies of 13b, 175b and Llama are those of the released tokenizers.
SHAPES = {
    "gpt:13b": gpt(5120, 40, 40),
    "gpt:175b": gpt(12288, 96, 96),
    "gpt:1t": gpt(25600, 128, 160, vocab=51200),
    "llama:8b": llama(4096, 32, 32, 14336),
    "llama:70b": llama(8192, 80, 64, 28672),
    "llama:405b": llama(16384, 126, 128, 53248),
}


class Attention(nn.Module):
    """Causal attention; several heads may share a key and a value."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        has_bias = not shape.is_gated
        self.shape, self.head_width = shape, shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=has_bias)
        self.key = nn.Linear(shape.width, kv_width, bias=has_bias)
        self.value = nn.Linear(shape.width, kv_width, bias=has_bias)
        self.out = nn.Linear(shape.width, shape.width, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.shape.kv_heads < self.shape.heads
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two matrices with a GELU between, or three with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        has_bias = not shape.is_gated
        self.up = nn.Linear(shape.width, shape.hidden, bias=has_bias)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False) if shape.is_gated else None
        self.down = nn.Linear(shape.hidden, shape.width, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        hidden = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        return self.down(hidden)


class Block(nn.Module):
    """Attention and MLP. With ``recomputes``, backward runs the forward again."""

    def __init__(self, shape: Shape, *, recomputes: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.is_gated else nn.LayerNorm
        self.norms = nn.ModuleList([norm(shape.width), norm(shape.width)])
        self.attention, self.mlp = Attention(shape), Mlp(shape)
        self.recomputes = recomputes

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)


class Model(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, shape: Shape, *, length: int, recomputes: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.positions = None if shape.is_gated else nn.Embedding(length, shape.width)
        blocks = (Block(shape, recomputes=recomputes) for _ in range(shape.depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm = (nn.RMSNorm if shape.is_gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def job(
    name: str = "gpt:13b",
    *,
    replicas: int = 1,
    reshard: bool | int = True,
    recompute: bool = True,
    offload: bool = False,
    bfloat16: bool = True,
    batch: int = 1,
    length: int = 2048,
    microbatches: int = 1,
    until_last: meshard.GradientSync = meshard.GradientSync.REDUCE_SCATTER,
    over_replicas: bool = False,
    state_on_host: bool = False,
    masters: bool = False,
    owners: bool = False,
    device: str = "cuda",
) -> Callable[[], object]:
    """Make one of ``SHAPES`` on this rank, and return a step.

    Args:
        name: Of one of ``SHAPES``.
        replicas: How many replicas share the work (HSDP).
        reshard: ``reshard_after_forward`` of the blocks.
        recompute: Compute the activations of blocks anew in backward.
        offload: Keep parameters, gradients and optimizer state in host memory.
        bfloat16: Compute and gather in bfloat16; parameters stay in float32.
        batch: Sequences of a microbatch, on each rank.
        length: Tokens of a sequence.
        microbatches: Of a step.
        until_last: How the microbatches before the last one reduce gradients.
        over_replicas: Cut gradients and optimizer state over the replicas too.
        state_on_host: Keep optimizer state in host memory, and step it on the device.
        masters: Keep parameters in bfloat16, and their float32 masters in the optimizer.
        owners: Step the matrices of blocks with Muon, each on one rank.
        device: The type of device of the ranks.
    """
    shape, world_size = SHAPES[name], dist.get_world_size()
    if world_size % replicas:
        raise ValueError(f"replicas must divide the number of ranks, {world_size}; got {replicas}.")
    if replicas == 1:
        mesh = init_device_mesh(device, (world_size,))
    else:
        mesh = init_device_mesh(device, (replicas, world_size // replicas))
    with torch.device("meta"):
        model = Model(shape, length=length, recomputes=recompute)
    if masters:
        model.bfloat16()
    shard = partial(
        meshard.fully_shard,
        mesh=mesh,
        reshard_after_forward=reshard,
        mp_policy=meshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if bfloat16
        else meshard.MixedPrecisionPolicy(),
        offload_policy=meshard.CPUOffloadPolicy() if offload else meshard.OffloadPolicy(),
    )
    for block in model.blocks:
        shard(block)
    shard(model)
    model.to_empty(device="cpu" if offload else device)
    optimizers: list[torch.optim.Optimizer] = []
    rest = dict(model.named_parameters())
    if owners:
        matrices = meshard.owner_optimizer(model, torch.optim.Muon, lr=1e-3)
        rest = {name: param for name, param in rest.items() if name not in matrices.owners}
        optimizers.append(matrices)
    adamw = meshard.local_optimizer(
        model,
        torch.optim.AdamW,
        rest.values(),
        lr=1e-3,
        over_replicas=over_replicas,
        state_device="cpu" if state_on_host else None,
        master_dtype=torch.float32 if masters else None,
    )
    optimizers.append(adamw)

    def step() -> None:
        tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        for each in meshard.microbatches(model, [tokens] * microbatches, until_last=until_last):
            scores = model(each).flatten(0, 1)
            functional.cross_entropy(scores.float(), each.flatten()).backward()
        meshard.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def main() -> None:
    for name, ranks, offload in [
        ("gpt:13b", 8, False),
        ("gpt:175b", 128, False),
        ("gpt:1t", 256, True),
    ]:
        planned = plan(partial(job, name, offload=offload), world_size=ranks, steps=1)
        print(
            f"{name} on {ranks} ranks{', offloaded' if offload else ''}: "
            f"{planned.state_bytes / 1e9:.1f} GB of state a rank, "
            f"peak on the GPU {planned.peak_bytes / 1e9:.1f} GB, in {planned.peak_phase}, "
            f"in host memory {planned.host_bytes / 1e9:.1f} GB; "
            f"a step sends {planned.wire_bytes / 1e9:.0f} GB"
        )


if __name__ == "__main__":
    main()
