"""Flat optimizers: the memory that a step takes at once."""

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshard import flat_optimizer, fully_shard
from meshard._shared_memory.channel import Channel
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks

WIDTH = 1024  # a square of it is 4 MiB, and a rank of two has half of that


class Kernels(TorchDispatchMode):
    """Notes how many bytes, and tensors, each square root of an AdamW is taken of."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::_foreach_sqrt":
            self.taken.append((sum(each.nbytes for each in args[0]), len(args[0])))
        return func(*args, **(kwargs or {}))


class Beside(nn.Module):
    """Three large layers and three small ones, none of which feeds another."""

    def __init__(self):
        super().__init__()
        widths = [WIDTH, WIDTH, WIDTH, 8, 8, 8]
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in widths)

    def forward(self, value):
        return sum(
            layer(torch.full((1, layer.in_features), value)).square().sum() for layer in self.layers
        )


def trained(*, is_flat, after_step=lambda: None):
    """Train; return the parameters, and what kernels took."""
    torch.manual_seed(0)
    model = Beside()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    options = {"lr": 0.1, "foreach": True}
    params = list(model.parameters())
    make = torch.optim.AdamW
    optimizer = flat_optimizer(model, make, **options) if is_flat else make(params, **options)
    for step in range(3):
        model(step + 1.0).backward()
        dist.barrier()  # a rank keeps what another one has not read yet
        with Kernels() as kernels:
            optimizer.step()
        after_step()
        optimizer.zero_grad()
    return full_state(model), kernels.taken


def held(channels):
    """Return the MiB that the segments of this rank hold."""
    return sum(os.fstat(each._own.descriptor).st_blocks * 512 for each in channels) >> 20


@on_ranks(2)
def test_large_units_one_by_one_and_small_ones_together():
    flat, taken = trained(is_flat=True)
    ordinary, _ = trained(is_flat=False)
    assert_same(ordinary, flat, bitwise=True)
    assert taken == [(2 << 20, 1)] * 3 + [(3 * 8 * 8 * 4 // 2, 3)]


def held_after_steps(*, is_flat):
    """Train; return the MiB that segments hold after each step."""
    channels, notes = [], []
    make = Channel.__init__

    def note(self, *args, **kwargs):
        make(self, *args, **kwargs)
        channels.append(self)

    with mock.patch.object(Channel, "__init__", note):
        trained(is_flat=is_flat, after_step=lambda: notes.append(held(channels)))
    return notes


@on_ranks(2)
def test_memory_of_segments_is_released_for_a_step():
    assert held_after_steps(is_flat=True) == held_after_steps(is_flat=False) == [0, 0, 0]
