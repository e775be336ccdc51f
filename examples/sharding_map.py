"""Which rank holds which rows of which parameter, as a table and as a picture.

python examples/sharding_map.py

Four ranks shard a small model over a mesh of two replicas by two shards. Every row of every
parameter holds its own number, so the shards themselves tell which rows they are.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import count, make_parser, new_file, parse
from extras import Figure, Rectangle
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import fully_shard

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
EMPTY = "#ececec"

Shapes = dict[str, torch.Size]
RowsOfRank = dict[str, list[int]]  # by name of the parameter


def build() -> nn.Module:
    """Return a model whose every row holds its own number."""
    layers = {
        "embed": nn.Embedding(10, 4),
        "up": nn.Linear(4, 8),
        "down": nn.Linear(8, 4, bias=False),
        "head": nn.Linear(4, 7, bias=False),
    }
    model = nn.Sequential(OrderedDict(layers))
    with torch.no_grad():
        for param in model.parameters():
            numbers = torch.arange(len(param), dtype=param.dtype)
            param.copy_(numbers.view(-1, *[1] * (param.dim() - 1)).expand_as(param))
    return model


def run(args: Namespace, device: torch.device) -> None:
    """Shard on this rank, and let the first one print and draw what all ranks hold."""
    model = build()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    shape = (args.replicas, args.ranks // args.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh)
    own: RowsOfRank = {}
    for name, param in model.named_parameters():
        local = param.to_local()
        own[name] = local.reshape(len(local), -1)[:, 0].int().tolist() if len(local) else []
    rows_of: list[RowsOfRank] = [{} for _ in range(args.ranks)]
    dist.all_gather_object(rows_of, own)
    if dist.get_rank():
        return
    print_table(shapes, rows_of, args.ranks // args.replicas)
    plot(shapes, rows_of, args)
    print(f"\npicture: {args.plot}")


def print_table(shapes: Shapes, rows_of: list[RowsOfRank], shards: int) -> None:
    """Print a line for each rank."""
    names = [f"{name} {list(shape)}" for name, shape in shapes.items()]
    print("rank  replica  shard  " + "  ".join(f"{name:>19}" for name in names))
    for rank, rows in enumerate(rows_of):
        cells = (f"rows {own[0]} to {own[-1]}" if own else "no rows" for own in rows.values())
        place = f"{rank:4}  {rank // shards:7}  {rank % shards:5}  "
        print(place + "  ".join(f"{cell:>19}" for cell in cells))


def plot(shapes: Shapes, rows_of: list[RowsOfRank], args: Namespace) -> None:
    """Draw each rank at its place in the mesh: all parameters, its own rows in colour."""
    shards = args.ranks // args.replicas
    size = (0.6 + 4.4 * shards, 0.5 + 2.4 * args.replicas)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(args.replicas, shards, squeeze=False)
    most_rows = max(shape[0] for shape in shapes.values())
    for rank, rows in enumerate(rows_of):
        replica, shard = divmod(rank, shards)
        panel = panels[replica, shard]
        left = 0.0
        for name, shape in shapes.items():
            width = shape[1] if len(shape) > 1 else 1
            for row in range(shape[0]):
                colour = COLOURS[shard % len(COLOURS)] if row in rows[name] else EMPTY
                panel.add_patch(
                    Rectangle((left, row), width, 1, facecolor=colour, edgecolor="white")
                )
                if row in rows[name]:
                    middle = (left + width / 2, row + 0.5)
                    panel.annotate(
                        str(row), middle, ha="center", va="center", color="white", fontsize=7
                    )
            label = name.replace(".", "\n.")
            panel.annotate(label, (left + width / 2, -0.3), ha="center", va="bottom", fontsize=7)
            left += width + 1.7
        panel.set(xlim=(-0.5, left - 1), ylim=(most_rows + 0.2, -2.2), xticks=[], yticks=[])
        panel.spines[:].set_color("#bbbbbb")
        title = f"rank {rank}: replica {replica}, shard {shard}"
        panel.set_title(title, fontsize=9, color=COLOURS[shard % len(COLOURS)])
    figure.supxlabel("shard axis: ranks side by side hold different rows", fontsize=9)
    figure.supylabel("replicate axis: ranks above one another hold the same rows", fontsize=9)
    figure.savefig(args.plot, dpi=130)


def main() -> None:
    """Read the command line and start the ranks."""
    parser = make_parser(__doc__.split("\n")[0], ranks=4)
    add = parser.add_argument
    add("--replicas", type=count, default=2, help="groups of ranks with the whole model (HSDP)")
    add("--plot", type=new_file, default=Path("sharding_map.png"), help="draw the map here")
    launch(run, parse(parser))


if __name__ == "__main__":
    main()
