"""Models of many families, each built of blocks, which the plans have not been tuned on."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import meshard
from tests.support.models import seeded

BATCH = 16


class Unet(nn.Module):
    """Images to images, with skips from each level down to the same level up."""

    def __init__(self, width=24):
        super().__init__()
        down = [nn.Conv2d(c, d, 3, padding=1) for c, d in [(3, width), (width, 2 * width)]]
        middle = nn.Sequential(
            nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.GroupNorm(4, 4 * width)
        )
        up = [
            nn.ConvTranspose2d(c, d, 2, stride=2)
            for c, d in [(4 * width, 2 * width), (4 * width, width)]
        ]
        self.blocks = nn.ModuleList([*down, middle, *up])
        self.head = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x):
        one, two, middle, first, second = self.blocks
        a = functional.silu(one(x))
        b = functional.silu(two(functional.max_pool2d(a, 2)))
        x = functional.silu(middle(functional.max_pool2d(b, 2)))
        x = torch.cat([first(x), b], 1)
        return self.head(torch.cat([second(x), a], 1))

    def batch(self):
        x = torch.randn(BATCH, 3, 32, 32)
        return (x,), x


class Experts(nn.Module):
    """A layer of experts, each of which gets the tokens that a router sends to it."""

    def __init__(self, dim, num_experts):
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(num_experts)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        # A fixed share for each, so that shapes do not depend on values.
        for number, expert in enumerate(self.experts):
            own = torch.arange(number, flat.size(0), len(self.experts))
            scale = weights[own].sum(-1, keepdim=True) + 0 * chosen[own].sum(-1, keepdim=True)
            out = out.index_add(0, own, expert(flat[own]) * scale)
        return x + out.view_as(x)


class Slots(Experts):
    """Each expert has slots for tokens, and the routing is a product with one-hot matrices."""

    def forward(self, x):
        flat = x.flatten(0, -2)
        num_slots = 2 * flat.size(0) // len(self.experts)
        weights = self.router(flat).softmax(-1)
        value, chosen = weights.max(-1)
        mask = functional.one_hot(chosen, len(self.experts)).to(flat.dtype)
        place = (mask.cumsum(0) * mask).sum(-1).long().clamp(max=num_slots - 1)
        slots = functional.one_hot(place, num_slots).to(flat.dtype)
        dispatch = mask[:, :, None] * slots[:, None]
        sent = torch.einsum("tes,td->esd", dispatch, flat)
        got = torch.stack([expert(own) for expert, own in zip(self.experts, sent, strict=True)])
        out = torch.einsum("tes,esd->td", dispatch * value[:, None, None], got)
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self, kind=Experts, dim=64, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(kind(dim, 4) for _ in range(depth))
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def batch(self):
        tokens = torch.randint(256, (BATCH, 64))
        return (tokens,), tokens


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, dim=96, depth=3, **options):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(
            kind(dim, dim, batch_first=True, **options) for _ in range(depth)
        )
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)

    def batch(self):
        tokens = torch.randint(256, (BATCH, 48))
        return (tokens,), tokens


class Translator(nn.Module):
    """An encoder and a decoder of torch."""

    def __init__(self, dim=96, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        options = {"dim_feedforward": 4 * dim, "dropout": 0.1, "batch_first": True}
        encoder = [nn.TransformerEncoderLayer(dim, 4, **options) for _ in range(depth)]
        decoder = [nn.TransformerDecoderLayer(dim, 4, **options) for _ in range(depth)]
        self.blocks, self.depth = nn.ModuleList([*encoder, *decoder]), depth
        self.head = nn.Linear(dim, 256)

    def forward(self, source, target):
        memory, x = self.embedding(source), self.embedding(target)
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        for block in self.blocks[: self.depth]:
            memory = block(memory)
        for block in self.blocks[self.depth :]:
            x = block(x, memory, tgt_mask=mask)
        return self.head(x)

    def batch(self):
        tokens = torch.randint(256, (BATCH, 32))
        return (tokens, tokens.flip(1)), tokens


class StateSpace(nn.Module):
    """A gated linear recurrence, computed by cumulative sums."""

    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm, self.into = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
            self.mix = nn.Conv1d(dim, dim, 4, padding=3, groups=dim)
            self.out = nn.Linear(dim, dim)

        def forward(self, x):
            u, decay, gate = self.into(self.norm(x)).chunk(3, -1)
            u = self.mix(u.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
            log = functional.logsigmoid(decay).cumsum(1)
            state = (log.exp() * (u * (-log).clamp(max=20).exp()).cumsum(1)) * functional.silu(gate)
            return x + self.out(state)

    def __init__(self, dim=96, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(self.Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def batch(self):
        tokens = torch.randint(256, (BATCH, 64))
        return (tokens,), tokens


class Vision(nn.Module):
    """A vision transformer with patches and a class token."""

    def __init__(self, dim=96, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        options = {"dim_feedforward": 4 * dim, "dropout": 0.0, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, batch_first=True, **options) for _ in range(depth)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.size(0), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])

    def batch(self):
        return (torch.randn(BATCH, 3, 32, 32),), torch.randint(10, (BATCH,))


class Residual(nn.Module):
    """A residual network with strides, batch norms and pooling."""

    class Block(nn.Module):
        def __init__(self, inner, outer, stride):
            super().__init__()
            self.one = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
            self.two = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
            self.skip = nn.Conv2d(inner, outer, 1, stride=stride, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))

        def forward(self, x):
            y = functional.relu(self.norms[0](self.one(x)), inplace=True)
            return functional.relu(self.norms[1](self.two(y)) + self.skip(x))

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.ModuleList(self.Block(*size) for size in sizes)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = functional.max_pool2d(self.stem(x), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    def batch(self):
        return (torch.randn(BATCH, 3, 64, 64),), torch.randint(10, (BATCH,))


class Recommender(nn.Module):
    """Tables of embeddings, their products, and a tower."""

    def __init__(self, dim=32, num_tables=6):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(1000, dim, mode="sum") for _ in range(num_tables)
        )
        self.dense = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, dim))
        pairs = num_tables * (num_tables + 1) // 2
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 256), nn.ReLU()) for width in (pairs + dim, 256, 256)
        )
        self.head = nn.Linear(256, 2)

    def forward(self, dense, ids):
        vectors = [self.dense(dense), *(table(ids[:, n]) for n, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        rows, columns = torch.tril_indices(len(vectors), len(vectors), -1)
        x = torch.cat([vectors[0], (stacked @ stacked.transpose(1, 2))[:, rows, columns]], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def batch(self):
        many = 256 * BATCH
        return (torch.randn(many, 13), torch.randint(1000, (many, 6, 4))), torch.randint(2, (many,))


FAMILIES = {
    "unet": Unet,
    "experts": Mixture,
    "experts with slots": lambda: Mixture(Slots),
    "lstm": Recurrent,
    "bidirectional lstm": lambda: Recurrent(nn.LSTM, dropout=0.1, num_layers=2),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "encoder and decoder": Translator,
    "state space": StateSpace,
    "vision": Vision,
    "residual": Residual,
    "recommender": Recommender,
}


def make_job(name, num_ranks=2):
    """Return a step of a family's job: every block is a unit, and AdamW steps."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(0)
    model = seeded(FAMILIES[name]())
    inputs, targets = model.batch()
    for block in model.blocks:
        meshard.fully_shard(block, mesh=mesh)
    meshard.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        out = model(*inputs)
        if targets.is_floating_point():
            loss = functional.mse_loss(out, targets)
        else:
            loss = functional.cross_entropy(out.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
