"""Which rank holds which rows of which parameter, for FSDP on four ranks and HSDP on two by two.

    python docs/pictures/sharding_map.py [docs/pictures/sharding_map.png]

One process stands for four ranks: where a row lies follows from the placements of the sharded
parameters, and nothing is communicated.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import fully_shard
from meshard.checkpoint import ShardedTensorRow, shard_table
from tests.support.ranks import fake_group

RANKS = 4
COLOURS = ("#3b6ea8", "#c8682c", "#4a8f5b", "#8a5aa5")  # of shards
EMPTY, GAP = "#e8e8e8", 1.4
WIDTHS = {"embed.weight": 4.0, "up.weight": 4.0, "up.bias": 1.6, "head.weight": 4.0}


def build() -> nn.Module:
    """Return a small model, of which the head has rows that four ranks do not divide."""
    layers = {
        "embed": nn.Embedding(10, 4),
        "up": nn.Linear(4, 8),
        "head": nn.Linear(8, 7, bias=False),
    }
    return nn.Sequential(OrderedDict(layers))


def rows_on_mesh(shape: tuple[int, ...]) -> list[ShardedTensorRow]:
    """Shard the model over a mesh of ``shape`` and return which rank holds which rows."""
    with fake_group(RANKS), torch.device("meta"):
        names = ("replicate", "shard")[-len(shape) :]
        model = fully_shard(build(), init_device_mesh("cpu", shape, mesh_dim_names=names))
        return shard_table(model)


def draw_rank(panel: Axes, table: list[ShardedTensorRow], rank: int, held: str) -> None:
    """Draw all parameters; the rows that ``rank`` holds have the colour ``held``."""
    left = 0.0
    for tensor in table:
        width = WIDTHS[tensor.name]
        own: set[int] = set()
        for shard in tensor.shards:
            if shard.rank == rank:
                own |= set(range(shard.offsets[0], shard.offsets[0] + shard.sizes[0]))
        for row in range(tensor.shape[0]):
            colour = held if row in own else EMPTY
            cell = Rectangle((left, row), width, 1, facecolor=colour, edgecolor="white")
            panel.add_patch(cell)
            if row in own:
                where = (left + width / 2, row + 0.53)
                panel.text(*where, str(row), ha="center", va="center", color="white", fontsize=7)
        label = tensor.name.replace(".", "\n.")
        panel.text(left + width / 2, -0.2, label, ha="center", va="bottom", fontsize=7.5)
        left += width + GAP
    panel.set(xlim=(-0.6, left - GAP + 0.6), ylim=(10.3, -2.6), xticks=[], yticks=[])
    panel.spines[:].set_color("#bbbbbb")


def main() -> None:
    """Draw one row of panels for each mesh."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png")
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    parts = figure.subfigures(2, 1, hspace=0.04)
    titles = (
        "FSDP, mesh of 4: each rank holds a part of its own",
        "HSDP, mesh of 2 x 2: ranks 0 and 1 together hold the model, and so do ranks 2 and 3",
    )
    for part, title, shape in zip(parts, titles, ((4,), (2, 2)), strict=True):
        part.suptitle(title, fontsize=10, fontweight="bold")
        table, shards = rows_on_mesh(shape), shape[-1]
        for rank, panel in enumerate(part.subplots(1, RANKS)):
            replica, shard = divmod(rank, shards)
            draw_rank(panel, table, rank, COLOURS[shard])
            place = f": replica {replica}, shard {shard}" if shards < RANKS else ""
            panel.set_title(f"rank {rank}{place}", fontsize=8.5, color=COLOURS[shard])
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    main()
