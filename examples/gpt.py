"""What is trained: a small GPT over bytes."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults make about 5 million parameters."""

    length: int = 128
    vocab: int = 256
    dim: int = 256
    heads: int = 4
    depth: int = 6


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, length, dim]`` to the same shape."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocab, config.dim)
        self.places = nn.Embedding(config.length, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # Residual outputs start smaller, so that depth does not blow the stream up.
                is_residual = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * config.depth) ** 0.5 if is_residual else 0.02
                nn.init.normal_(param, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, length]`` to logits ``[batch, length, vocab]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: GPT, prompt: str, num_bytes: int, device: torch.device) -> str:
    """Return ``prompt`` continued. Every rank calls this: the model is sharded over all."""
    generator = torch.Generator().manual_seed(0)  # so all ranks draw the same bytes
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.config.length :])[0, -1].float().cpu()
        probabilities = torch.softmax(logits / 0.7, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
