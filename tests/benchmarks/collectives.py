"""Collectives of a step: how many, of how many bytes, and how much of that is padding.

    python tests/benchmarks/collectives.py [--world 8] [--json]

Counted at the dispatcher, for both, on a fake process group: so any world size will do. Bytes are
those of the whole buffers. The model has a parameter whose rows no world divides.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.train_gpt import GPT, GPTConfig
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE, shard_by_units
from tests.support.fake import fake_group

# gloo has no fast reduce-scatter: ours is an exchange of the same buffer and a local sum
_KINDS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "reduce_scatter",
    "all_to_all": "reduce_scatter",
    "allreduce": "all_reduce",
}


class Counting(TorchDispatchMode):
    """Counts the collectives of process groups, and the bytes of the larger buffer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what it is, and let it go on."""
        name = str(func)
        if name.startswith("c10d."):
            kind = next((kind for part, kind in _KINDS.items() if part in name), name)
            leaves = torch.utils._pytree.tree_leaves(args[:2])
            size = max(each.nbytes for each in leaves if torch.is_tensor(each))
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.bytes[kind] = self.bytes.get(kind, 0) + size
        return func(*args, **(kwargs or {}))


def count(name: str, world: int) -> dict[str, Any]:
    """Return counts and bytes of one step in steady state, and the bytes of all parameters."""
    gpt = GPT(GPTConfig(width=192, depth=4, heads=3, context=65))
    num_bytes = sum(param.nbytes for param in gpt.parameters())
    mesh = init_device_mesh("cpu", (world,))
    model: nn.Module = shard_by_units(name, gpt, mesh)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        model(tokens).sum().backward()
        model.zero_grad()
    with Counting() as counting:
        model(tokens).sum().backward()
    return {"counts": counting.counts, "bytes": counting.bytes, "parameter_bytes": num_bytes}


def run(world: int = 8) -> dict[str, Any]:
    """Count for both; return the figures."""
    figures = {}
    with fake_group(world):
        for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE):
            figures[name] = count(name, world)
    print(report(figures, world), file=sys.stderr, flush=True)
    return figures


def report(figures: dict[str, Any], world: int) -> str:
    """Return a table."""
    lines = [f"collectives of a step, world {world}", f"{'':<30}{'number':>8}{'MiB':>8}{'/ P':>8}"]
    for name, each in figures.items():
        total = sum(each["bytes"].values())
        lines.append(
            f"  {name:<28}{sum(each['counts'].values()):>8}{total / 2**20:>8.2f}"
            f"{total / each['parameter_bytes']:>8.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.world)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
