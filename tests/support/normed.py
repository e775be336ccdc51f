"""A model with units, a parameter of the root, buffers and a tie, and a check of what it holds."""

import torch
from torch import nn

from tests.support.models import MlpBlock, seeded
from tests.support.parity import assert_same, full_grads, whole


class Normed(nn.Module):
    """Units, a parameter of the root, buffers, and a tie."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(6, 7) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.empty(6))
        self.head = nn.Linear(6, 6, bias=False)
        self.second_head = nn.Linear(6, 6, bias=False)
        self.second_head.weight = self.head.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.second_head(self.head(self.norm(x) * self.scale))


def values(seed):
    """A plain model, with buffers that no other has."""
    model = seeded(Normed(), seed)
    model.norm.running_mean += seed
    model.norm.num_batches_tracked += seed
    return model


def same_models(model, plain, batch):
    """The two hold the same, compute the same, and train in the same way."""
    state = {name: whole(value) for name, value in model.state_dict().items()}
    assert_same(state, dict(plain.state_dict()), bitwise=True)
    for each in (model, plain):
        each.eval()
    assert_same(model(batch), plain(batch))
    for each in (model, plain):
        each.zero_grad()
        each(batch).square().mean().backward()
        each.train()
    assert_same(full_grads(model), full_grads(plain))


BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
