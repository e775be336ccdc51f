"""Collectives of a step: how many, of how many bytes, and how much of that is padding.

Counted at the dispatcher, for both, on a fake process group: so any world size will do. Bytes are
those of the whole buffers, also divided by those of all parameters (P). The model has a parameter
whose rows no world divides.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from examples.train_gpt import GPT, GPTConfig
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE, shard_by_units
from tests.benchmarks.rounds import show
from tests.support.ranks import fake_group


class Counting(TorchDispatchMode):
    """Counts the collectives of process groups, and the bytes of the larger buffer of each."""

    def __init__(self):
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("c10d."):
            leaves = torch.utils._pytree.tree_leaves(args[:2])
            self.count += 1
            self.bytes += max(each.nbytes for each in leaves if torch.is_tensor(each))
        return func(*args, **(kwargs or {}))


def cells_of(name, world):
    """Count one step in steady state."""
    gpt = GPT(GPTConfig(width=192, depth=4, heads=3, context=65))
    num_bytes = sum(param.nbytes for param in gpt.parameters())
    model = shard_by_units(name, gpt, init_device_mesh("cpu", (world,)))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        model(tokens).sum().backward()
        model.zero_grad()
    with Counting() as counting:
        model(tokens).sum().backward()
    mib, ratio = counting.bytes / 2**20, counting.bytes / num_bytes
    return str(counting.count), f"{mib:.2f}", f"{ratio:.3f}"


def run(world=8):
    with fake_group(world):
        rows = {name: cells_of(name, world) for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE)}
    show(f"collectives of a step, world {world}", ("number", "MiB", "/ P"), rows)
