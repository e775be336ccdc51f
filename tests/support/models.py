"""Use these small models, which use their parameters in various ways, or ``Made`` for another.

All randomness comes from a generator of its own: torch's random state is shared by ranks that are
threads. Forwards take and return one tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Overwrite every parameter of ``model`` by numbers that depend on ``seed`` only."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            values = torch.randn(param.shape, generator=generator) * 0.3
            param.copy_(values.to(param.dtype))
    return model


class Made(nn.Module):
    """A module of the given members, for a forward that only one test needs.

    ``Made(lambda m, x: m.head(m.body(x)), body=nn.Linear(4, 4), head=nn.Linear(4, 2))``: members
    are modules, parameters, or lists of modules; other values become plain attributes.
    """

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self._function = forward
        for name, member in members.items():
            is_list = isinstance(member, list) and isinstance(member[0], nn.Module)
            setattr(self, name, nn.ModuleList(member) if is_list else member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


class Blocks(nn.Module):
    """Blocks behind an inlet, one after the other: each is called with all that follows ``x``."""

    def __init__(self, inlet: nn.Module, *blocks: nn.Module) -> None:
        super().__init__()
        self.inlet, self.blocks = inlet, nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, *args)
        return x


class MlpBlock(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class MlpStack(nn.Module):
    """Blocks in a ModuleList, beside parameters that the root owns itself."""

    def __init__(self, dim: int = 6, hidden: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(MlpBlock(dim, hidden) for _ in range(depth))
        self.shift = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x + self.shift


class ChosenBlocks(nn.Module):
    """Blocks of which a call runs some; ``cut`` is the one before which the graph is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(6, 8) for _ in range(3))

    def forward(
        self, x: torch.Tensor, chosen: Sequence[int] = (0, 1, 2), cut: int | None = None
    ) -> torch.Tensor:
        for number in chosen:
            x = self.blocks[number](x.detach() if number == cut else x)
        return x


class Attention(nn.Module):
    """Causal self-attention over ``[batch, length, dim]``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Token ids ``[batch, length]`` to logits; the head may be tied to the embedding."""

    def __init__(
        self, *, vocab: int = 11, dim: int = 8, heads: int = 2, depth: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UnevenMlp(nn.Module):
    """Sizes that no number of ranks divides: 7, 13 and 5, and a bias of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank addition in the same unit."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down = nn.Linear(dim, 3, bias=False)
        self.up = nn.Linear(3, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class MixedDtypeBlock(nn.Module):
    """A float32 norm and a bfloat16 linear layer in one unit."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x).bfloat16()).float()


class TiedBlock(nn.Module):
    """Two layers with one weight, inside of one unit."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Experts(nn.Module):
    """Three layers of one unit of which a call uses some: ``forward(x, used)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: torch.Tensor, used: Sequence[bool] = (True, True, True)) -> torch.Tensor:
        for expert, is_used in zip(self.experts, used, strict=True):
            x = x + torch.tanh(expert(x)) if is_used else x
        return x


class Ones(nn.Module):
    """Two vectors; ``forward(a, b)`` gives each a gradient of that value, or none."""

    def __init__(self, numel: int = 4, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, a: float | None = None, b: float | None = None) -> torch.Tensor:
        out = torch.zeros((), requires_grad=True) * 1.0
        for param, value in ((self.a, a), (self.b, b)):
            out = out if value is None else out + value * param.sum()
        return out


Gradients = Sequence[torch.Tensor | None]


class Table(nn.Module):
    """Parameters whose gradients are chosen freely: ``sum(param * given gradient)``."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(torch.zeros(tuple(shape), dtype=dtype))
            for shape, dtype in zip(shapes, dtypes or [None] * len(shapes), strict=True)
        )

    def forward(self, x: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        for param, gradient in zip(self.params, gradients, strict=True):
            x = x if gradient is None else x + (param * gradient).sum()
        return x


class Tables(Table):
    """Units of a table each, and a table that the root owns.

    ``forward`` takes a row of gradients per unit, the root's last; a unit whose row is None is not
    run.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[Sequence[int]]],
        dtypes: Sequence[Sequence[torch.dtype]] | None = None,
    ) -> None:
        rows = dtypes or [None] * len(shapes)
        super().__init__(shapes[-1], rows[-1])
        self.units = nn.ModuleList(Table(*row) for row in zip(shapes[:-1], rows[:-1], strict=True))

    def forward(self, gradients: Sequence[Gradients | None]) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True) * 1.0
        for unit, own in zip(self.units, gradients[:-1], strict=True):
            x = x if own is None else unit(x, own)
        return super().forward(x, gradients[-1])
