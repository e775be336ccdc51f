"""Jobs that are planned, and run on ranks as they are."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, GradientSync
from tests.support.models import Transformer, seeded

VOCAB, DIM, LENGTH, BATCH = 512, 128, 32, 32


class RmsNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    """Attention with rotary positions and grouped heads, and a gated MLP."""

    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, dim // heads
        self.norms = nn.ModuleList([RmsNorm(dim), RmsNorm(dim)])
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, groups * self.width, bias=False)
        self.value = nn.Linear(dim, groups * self.width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def attend(self, x, angles):
        batch, length, dim = x.shape
        query = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        key, value = (
            layer(x).view(batch, length, self.groups, self.width).transpose(1, 2)
            for layer in (self.key, self.value)
        )
        query, key = (self.turned(each, angles) for each in (query, key))
        key, value = (
            each.repeat_interleave(self.heads // self.groups, dim=1) for each in (key, value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))

    def turned(self, x, angles):
        one, two = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-two, one], dim=-1) * angles.sin()

    def forward(self, x, angles):
        x = x + self.attend(self.norms[0](x), angles)
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Token ids to logits by the embedding's own weight."""

    def __init__(self, depth=6, heads=8, groups=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(LlamaBlock(DIM, heads, groups) for _ in range(depth))
        self.norm = RmsNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        width = DIM // heads
        frequencies = 1e4 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(LENGTH), frequencies).repeat(1, 2)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        y = functional.relu(self.norms[0](self.convs[0](x)))
        return functional.relu(x + self.norms[1](self.convs[1](y)))


class ConvNet(nn.Module):
    """Images ``[batch, 3, 16, 16]`` to scores."""

    def __init__(self, channels=32, depth=12):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class LowRank(nn.Module):
    """A frozen layer with trainable adapters."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def gpt(depth=6):
    return Transformer(vocab=VOCAB, dim=DIM, heads=4, depth=depth)


def adapted():
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        block.mlp[0], block.mlp[2] = LowRank(block.mlp[0], 8), LowRank(block.mlp[2], 8)
    return model


def checkpointed():
    model = gpt(depth=12)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


MODELS = {
    "gpt": gpt,
    "llama": Llama,
    "convolutions": ConvNet,
    "adapters": adapted,
    "checkpointed": checkpointed,
}


def batch_for(name):
    if name == "convolutions":
        return torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,))
    shape = BATCH, LENGTH
    return torch.randint(VOCAB, shape), torch.randint(VOCAB, shape)


def make_job(
    name,
    *,
    mesh_shape=(2,),
    reshard=True,
    mode="FULL",
    num_microbatches=1,
    how="plain",
    device="cpu",
):
    """Return a step of a job: see ``MODELS`` and the branches on ``how``."""
    mesh = init_device_mesh(device, mesh_shape)
    with torch.device(device):
        model = MODELS[name]()
        batches = [batch_for(name) for _ in range(num_microbatches)]
    seeded(model)
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        meshard.fully_shard(block, **options)
    meshard.fully_shard(model, **options)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = []
    if how == "overlap":
        optimizer = meshard.overlap_optimizer(model, torch.optim.AdamW, lr=1e-3)
    elif how == "owners":
        optimizer = meshard.owner_optimizer(model, torch.optim.Muon, lr=1e-3)
        named = model.named_parameters()
        rest = [each for name, each in named if name not in optimizer.owners]
        optimizers.append(torch.optim.AdamW(rest, lr=1e-3))
    elif how == "local":
        optimizer = meshard.local_optimizer(model, torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-3)
    optimizers.append(optimizer)

    def step():
        window = meshard.microbatches(model, batches, until_last=GradientSync[mode])
        for inputs, targets in window:
            scores = model(inputs)
            functional.cross_entropy(scores.flatten(0, -2), targets.flatten()).backward()
        if how != "overlap":
            meshard.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()
            each.zero_grad()

    return step
