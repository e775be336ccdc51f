"""What do NONE, REDUCE_SCATTER and FULL cost? Four ranks, two replicas of two shards, side by side.

python examples/hsdp_microbatches.py
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import CommLedger, GradientSync, fully_shard, microbatches, pending_gradients

MIB = 2**20


def build(mesh_shape: tuple[int, int]) -> nn.Module:
    """Return a model of four units, the same on every rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    for layer in model[:3]:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def retained_bytes(model: nn.Module, whole_bytes: int, mode: GradientSync) -> int:
    """Return the bytes of gradients that this rank keeps between two microbatches."""
    if mode is GradientSync.NONE:
        return whole_bytes if pending_gradients(model) else 0
    kept = [partial for partial in pending_gradients(model).values() if partial is not None]
    kept += [param.grad for param in model.parameters() if param.grad is not None]
    return sum(tensor.to_local().nbytes for tensor in kept)


def measure(args: Namespace, mode: GradientSync) -> tuple[CommLedger, int, torch.Tensor]:
    """Run one window under ``mode`` until its last microbatch."""
    model = build((args.replicas, args.ranks // args.replicas))
    whole_bytes = sum(param.numel() * 4 for param in model.parameters())
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(args.microbatches, args.ranks, 8, 512, generator=generator)
    retained = 0
    with CommLedger(model) as ledger:
        for number, batch in enumerate(microbatches(model, batches, until_last=mode)):
            if number == args.microbatches - 1:
                retained = retained_bytes(model, whole_bytes, mode)
            model(batch[dist.get_rank()]).square().mean().backward()
    gradient = next(model.parameters()).grad.full_tensor()
    return ledger, retained, gradient


def run(args: Namespace, device: torch.device) -> None:
    """Measure all three on this rank; the first one prints."""
    results = {mode: measure(args, mode) for mode in GradientSync}
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
    reference = results[GradientSync.FULL][2]
    for mode, (ledger, retained, gradient) in results.items():
        is_same = torch.allclose(gradient, reference, rtol=1e-5, atol=1e-8)
        row = (
            mode.name,
            ledger.counts["reduce_scatter"],
            ledger.counts["all_reduce"],
            f"{ledger.wire_bytes / MIB:.1f}",
            f"{retained / MIB:.1f}",
            "yes" if is_same else "NO",
        )
        print("  ".join(f"{cell!s:>14}" for cell in row))


def main() -> None:
    """Read the command line and start the ranks."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    args = parser.parse_args()
    if args.ranks % args.replicas:
        parser.error(f"--replicas {args.replicas} must divide --ranks {args.ranks}")
    launch(run, args)


if __name__ == "__main__":
    main()
