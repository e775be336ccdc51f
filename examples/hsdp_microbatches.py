"""Cost of NONE, REDUCE_SCATTER and FULL, on four ranks: two replicas of two shards.

python examples/hsdp_microbatches.py

It prints what each sends and keeps in all, and draws both at each microbatch.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import count, make_parser, new_file, parse
from extras import Figure
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshard import CommLedger, GradientSync, fully_shard, microbatches, pending_gradients

MIB = 2**20
COLOURS = {"all_gather": "#cccccc", "reduce_scatter": "#4c72b0", "all_reduce": "#c44e52"}
KEPT_COLOUR = "#dd8452"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one rank sent and kept in one window."""

    ledger: CommLedger
    first_events: list[int]  # index of the first collective of each microbatch
    kept: list[int]  # bytes, before each microbatch
    gradient: torch.Tensor  # of the first parameter, unsharded

    def sent(self) -> list[Counter[str]]:
        """Return the bytes that this rank sent in each microbatch, by kind of collective."""
        ends = [*self.first_events[1:], len(self.ledger.events)]
        found: list[Counter[str]] = []
        for begin, end in zip(self.first_events, ends, strict=True):
            found.append(Counter())
            for event in self.ledger.events[begin:end]:
                found[-1][event.op] += event.wire_bytes
        return found


def build(mesh_shape: tuple[int, int], device: torch.device) -> nn.Module:
    """Return a model of four units, the same on every rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).to(device)
    for layer in model[:3]:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def live_bytes() -> int:
    """Return the bytes of all tensors that are alive in this process, each storage once."""
    dist.barrier()
    time.sleep(0.2)  # gloo's threads free what was sent a little after it has arrived
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # By type: reading __class__ of some objects of torch raises a warning.
        if issubclass(type(thing), torch.Tensor):
            local = thing.to_local() if isinstance(thing, DTensor) else thing
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(args: Namespace, device: torch.device, mode: GradientSync) -> Window:
    """Run one window under ``mode``; look at memory before each microbatch."""
    model = build((args.replicas, args.ranks // args.replicas), device)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(args.microbatches, args.ranks, 8, 512, generator=generator).to(device)
    model(batches[0, 0]).sum().backward()  # what is made once is made now
    model.zero_grad()
    before = live_bytes()
    first_events, kept = [], []
    with CommLedger(model) as ledger:
        for batch in microbatches(model, batches, until_last=mode):
            pending_gradients(model)  # finishes reductions in flight
            kept.append(live_bytes() - before)
            first_events.append(len(ledger.events))
            model(batch[dist.get_rank()]).square().mean().backward()
    gradient = next(model.parameters()).grad.full_tensor()
    return Window(ledger=ledger, first_events=first_events, kept=kept, gradient=gradient)


def run(args: Namespace, device: torch.device) -> None:
    """Measure all three on this rank; the first one prints."""
    results = {mode: measure(args, device, mode) for mode in GradientSync}
    if dist.get_rank():
        return
    print(
        f"{args.microbatches} microbatches, {args.replicas} replicas of "
        f"{args.ranks // args.replicas} shards, 4 units of 1 MiB\n"
    )
    head = (
        "until the last",
        "reduce-scatter",
        "all-reduce",
        "sent MiB",
        "kept MiB",
        "same as FULL",
    )
    print("  ".join(f"{cell:>14}" for cell in head))
    reference = results[GradientSync.FULL].gradient
    for mode, window in results.items():
        is_same = torch.allclose(window.gradient, reference, rtol=1e-5, atol=1e-8)
        row = (
            mode.name,
            window.ledger.counts.get("reduce_scatter", 0),
            window.ledger.counts.get("all_reduce", 0),
            f"{window.ledger.wire_bytes / MIB:g}",
            f"{window.kept[-1] / MIB:g}",
            "yes" if is_same else "NO",
        )
        print("  ".join(f"{cell!s:>14}" for cell in row))
    plot(results, args.plot)
    print(f"\nsent and kept at each microbatch: {args.plot}")


def plot(results: dict[GradientSync, Window], path: Path) -> None:
    """Draw what each mode sends in each microbatch, and what it keeps before it."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(2, len(results), sharex=True, sharey="row")
    for (mode, window), (above, below) in zip(results.items(), panels.T, strict=True):
        numbers = range(1, len(window.kept) + 1)
        tops = [0.0] * len(numbers)
        for op, colour in COLOURS.items():
            heights = [sent[op] / MIB for sent in window.sent()]
            above.bar(numbers, heights, bottom=tops, color=colour, label=op.replace("_", "-"))
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
        below.bar(numbers, [kept / MIB for kept in window.kept], color=KEPT_COLOUR)
        above.set_title(f"{mode.name}: {window.ledger.wire_bytes / MIB:g} MiB sent", fontsize=10)
        below.set(xlabel="microbatch", xticks=numbers)
        for panel in (above, below):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", alpha=0.25)
            panel.set_axisbelow(True)
    panels[0, 0].set_ylabel("sent in it, MiB per rank")
    panels[1, 0].set_ylabel("gradients kept before it,\nMiB per rank")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Read the command line and start the ranks."""
    parser = make_parser(__doc__.split("\n")[0], ranks=4)
    add = parser.add_argument
    add("--replicas", type=count, default=2, help="groups of ranks with the whole model (HSDP)")
    add("--microbatches", type=count, default=4, help="backward passes per step")
    add("--plot", type=new_file, default=Path("sync_modes.png"), help="draw them here")
    launch(run, parse(parser))


if __name__ == "__main__":
    main()
