"""Collectives of a step: how many, of how many bytes, and how much of that is padding.

Counted at the dispatcher, for both, on a fake process group: so any world size will do. Bytes are
those of the whole buffers, also divided by those of all parameters (P). The model has a parameter
whose rows no world divides.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh

from examples.train_gpt import GPT, GPTConfig
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE, shard_by_units
from tests.benchmarks.rounds import show
from tests.support.collectives import Collectives
from tests.support.ranks import fake_group


def cells_of(name, world):
    """Count one step in steady state."""
    gpt = GPT(GPTConfig(width=192, depth=4, heads=3, context=65))
    num_bytes = sum(param.nbytes for param in gpt.parameters())
    model = shard_by_units(name, gpt, init_device_mesh("cpu", (world,)))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        model(tokens).sum().backward()
        model.zero_grad()
    with Collectives() as sent:
        model(tokens).sum().backward()
    total = sum(sent.bytes.values())
    return str(sum(sent.counts.values())), f"{total / 2**20:.2f}", f"{total / num_bytes:.3f}"


def run(world=8):
    with fake_group(world):
        rows = {name: cells_of(name, world) for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE)}
    show(f"collectives of a step, world {world}", ("number", "MiB", "/ P"), rows)
