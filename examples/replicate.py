"""Data parallel training with a copy on every rank, and the memory of its gradients.

python examples/replicate.py

Two ranks of this machine train a small byte-level GPT, once with ``meshard.replicate`` and once
with torch's DistributedDataParallel, on the same bytes. With torchrun:

torchrun --nproc-per-node 8 examples/replicate.py
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from byte_gpt import GPT, GPTConfig, loss_per_window
from byte_text import Corpus
from command_line import count, make_parser, new_file, old_file, parse
from extras import Figure
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from meshard import clip_grad_norm_, microbatches, replicate

CONFIG = GPTConfig(width=128, depth=2, heads=4, context=64)
MIB = 2**20


def build(name: str, device: torch.device) -> nn.Module:
    """Return the model in one of the two ways, the same values on every rank."""
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    if name == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return replicate(model, mesh, bucket_cap_mb=1)


def parts(model: nn.Module, windows: Tensor, count: int) -> Iterator[Tensor]:
    """Iterate over the microbatches of one step; gradients are reduced with the last one."""
    chunks = windows.chunk(count)
    if not isinstance(model, DistributedDataParallel):
        yield from microbatches(model, chunks)
        return
    for number, chunk in enumerate(chunks):
        with nullcontext() if number == len(chunks) - 1 else model.no_sync():
            yield chunk


def train(args: Namespace, name: str, device: torch.device) -> list[float]:
    """Return the mean loss over all ranks of each step."""
    model = build(name, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    corpus = Corpus.load(args.data, CONFIG.context)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = torch.zeros(args.steps, device=device)
    for step in range(args.steps):
        windows = corpus.batch(step, num_windows=16 * world, context=CONFIG.context, seed=0)
        for part in parts(model, windows[rank::world].to(device), args.microbatches):
            loss = loss_per_window(model, part).mean() / args.microbatches
            loss.backward()
            losses[step] += loss.detach() / world
        if name == "DDP":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip_grad_norm_(model, 1.0)
        if step == args.steps - 1:
            report_memory(name, model)
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(losses)
    return losses.tolist()


def report_memory(name: str, model: nn.Module) -> None:
    """Print how many tensors all gradients lie in."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
    if not dist.get_rank():
        own = sum(grad.nbytes for grad in grads)
        print(
            f"{name:>9}: {len(grads)} gradients of {own / MIB:.2f} MiB "
            f"in {len(storages)} buckets of {sum(storages.values()) / MIB:.2f} MiB"
        )


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the losses of all runs over the steps."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A copy on every rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def run(args: Namespace, device: torch.device) -> None:
    """Train in both ways on this rank; the first one prints and draws."""
    curves = {name: train(args, name, device) for name in ("replicate", "DDP")}
    if dist.get_rank():
        return
    print("\nstep   replicate        DDP")
    shown = sorted({*range(0, args.steps, max(1, args.steps // 5)), args.steps - 1})
    for step in shown:
        print(f"{step:4}  {curves['replicate'][step]:10.4f} {curves['DDP'][step]:10.4f}")
    plot(curves, args.plot)
    print(f"\nlosses: {args.plot}")


def main() -> None:
    """Read the command line and start the ranks."""
    parser = make_parser("Train with a copy on every rank, as DDP does.", ranks=2)
    add = parser.add_argument
    add("--steps", type=count, default=60)
    add("--microbatches", type=count, default=2, help="backward passes per step")
    add("--data", type=old_file, help="any text file; None: Python's own language reference")
    add("--plot", type=new_file, default=Path("replicate.png"), help="draw the losses here")
    args = parse(parser)
    try:
        Corpus.load(args.data, CONFIG.context)
    except ValueError as error:
        parser.error(str(error))
    launch(run, args)


if __name__ == "__main__":
    main()
