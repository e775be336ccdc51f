"""Cost of NONE, REDUCE_SCATTER and FULL, on four ranks: two replicas of two shards.

python examples/hsdp_microbatches.py
"""

from __future__ import annotations

import gc
import time
from argparse import ArgumentParser, Namespace

import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

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


def measure(args: Namespace, mode: GradientSync) -> tuple[CommLedger, int, torch.Tensor]:
    """Run one window under ``mode``; look at memory before it, and before its last microbatch."""
    model = build((args.replicas, args.ranks // args.replicas))
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(args.microbatches, args.ranks, 8, 512, generator=generator)
    model(batches[0, 0]).sum().backward()  # what is made once is made now
    model.zero_grad()
    before, retained = live_bytes(), 0
    with CommLedger(model) as ledger:
        for number, batch in enumerate(microbatches(model, batches, until_last=mode)):
            if number == args.microbatches - 1:
                pending_gradients(model)  # finishes reductions in flight
                retained = live_bytes() - before
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
            f"{ledger.wire_bytes / MIB:g}",
            f"{retained / MIB:g}",
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
