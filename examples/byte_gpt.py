"""A small GPT over bytes, written as for one device.

Nothing here knows about ranks, meshes or shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a model; the defaults give 0.9 million parameters."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128  # in bytes
    shifts_tokens: bool = True  # attention sees half of the channels of the byte before

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads.")


class Block(nn.Module):
    """Causal attention, then a two-layer MLP, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.shifts_tokens = config.shifts_tokens
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix_heads = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` [batch, time, width] to the same shape."""
        normed = self.norm_attention(hidden)
        hidden = hidden + self.attend(shift_half(normed) if self.shifts_tokens else normed)
        return hidden + self.narrow(F.gelu(self.widen(self.norm_mlp(hidden))))

    def attend(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix_heads(mixed.transpose(1, 2).reshape(batch, time, width))


def shift_half(hidden: Tensor) -> Tensor:
    """Give each byte half of the channels of the one before it: pairs need not be learned."""
    own, previous = hidden.chunk(2, dim=-1)
    return torch.cat([own, F.pad(previous[:, :-1], (0, 0, 1, 0))], dim=-1)


class GPT(nn.Module):
    """Predicts each next byte from those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embed_byte = nn.Embedding(VOCABULARY, config.width)
        self.embed_position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise(config)

    def _initialise(self, config: GPTConfig) -> None:
        for name, weight in self.named_parameters():
            if name.endswith(("mix_heads.weight", "narrow.weight", "head.weight")):
                nn.init.zeros_(weight)  # each block starts as the identity, each byte as likely
            elif name.startswith("embed_"):
                nn.init.normal_(weight, std=0.5 if name.startswith("embed_byte") else 0.05)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.8 * config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens`` [batch, time] to logits [batch, time, 256] of the byte after each."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed_byte(tokens) + self.embed_position(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).float()


def loss_per_window(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats per byte, of each of ``windows`` [batch, context + 1]."""
    logits = model(windows[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return losses.view(len(windows), -1).mean(dim=1)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, num_bytes: int, *, temperature: float, seed: int) -> str:
    """Continue ``prompt``, byte by byte.

    Every rank calls this and draws the same bytes, since every forward gathers the model.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.context :])[0, -1].cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator).to(device)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
