"""Peak memory of a training step.

    python tests/benchmarks/memory.py [--ranks 2] [--json]

Beside the measured peak stands what the formula of docs/explanation/memory.md gives; it is one for
ranks that send through sockets. Memory that ranks of one host share counts once, on the rank that
has made it.

The peak of a step in steady state, with everything in it: shards, gradients, AdamW's state,
activations, what is gathered, and gloo's own buffers. It is that of the resident set of rank 0, in
a process of its own for each contender, less what was resident before the model was built; malloc
is told to map every larger tensor by itself and to give it back at once: nothing else counts.
(The allocation events of torch's profiler miss what threads of gloo free, and what was there before
the profiler: the same step came out between 279 and 318 MiB.) A run in which losses differ is void.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import contenders
from tests.benchmarks.contenders import (
    DDP,
    FSDP1,
    OURS,
    OURS_WHOLE,
    PEER,
    PEER_WHOLE,
    SENT,
    SENT_WHOLE,
    WIDTH_512,
    Configuration,
)
from tests.benchmarks.rounds import on_ranks
from tests.support.memory_formula import Sizes, bytes_of, peaks, saved_by
from tests.support.physical import metered, resident

EVERYBODY = (DDP, FSDP1, PEER, OURS, SENT, PEER_WHOLE, OURS_WHOLE, SENT_WHOLE)
WARM_UP, STEPS = 3, 5
TARGETS = (
    (OURS, PEER, 1.00),
    (SENT, PEER, 1.00),
    (OURS_WHOLE, PEER_WHOLE, 1.00),
    (SENT_WHOLE, PEER_WHOLE, 1.00),
)
TINY = Configuration("what loads with the first step", width=64, batch=1, context=16, depth=2)


class Peak(NamedTuple):
    """What one contender took."""

    resident: int  # bytes
    at_rest: int  # bytes that are resident after the step
    loss: float


def measure(name: str) -> Peak:
    """Train with one contender and look at the last steps.

    **Collective:** all ranks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batch = WIDTH_512.make_batch(dist.get_rank())
    # What is loaded with the first step is nobody's.
    contenders.trainer(contenders.make(name, TINY, mesh), TINY.make_batch(dist.get_rank()))()
    before = resident("VmRSS")
    peaks = []
    with metered() as meter:
        step = contenders.trainer(contenders.make(name, WIDTH_512, mesh), batch)
        for _ in range(WARM_UP):
            step()
        for _ in range(STEPS):
            meter.begin_anew()
            loss = step()
            meter.look()
            peaks.append(meter.peak - before)
    at_rest = resident("VmRSS") - before
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    return Peak(
        int(statistics.median(peaks)),
        at_rest,
        mean.item() / dist.get_world_size(),
    )


def sizes_of(
    ranks: int,
    *,
    reshards: bool,
    configuration: Configuration = WIDTH_512,
    device: torch.device | None = None,
) -> Sizes:
    """Return what the formula wants to know of the model."""
    model = configuration.make_model(device)
    tokens, following = (each.to(device) for each in configuration.make_batch(0))

    def loss() -> torch.Tensor:
        logits = model(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    blocks = list(model.blocks)
    units = [bytes_of(block) for block in blocks]
    return Sizes(
        units=units,
        largest=[max(p.numel() * p.itemsize for p in block.parameters()) for block in blocks],
        activations=saved_by(blocks, loss),
        root=bytes_of(model) - sum(units),
        shards=ranks,
        reshards=reshards,
    )


def run(ranks: int = 2) -> dict[str, Any]:
    """Measure everybody; return the figures.

    Raises:
        RuntimeError: The losses differ.
    """
    # For the processes that start now: glibc would keep what is freed, by a rule that adapts.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    results = {}
    for name in EVERYBODY:
        results[name] = on_ranks(measure, name, ranks)
    for name, peak in results.items():
        if abs(peak.loss - results[PEER].loss) > 1e-4 * results[PEER].loss:
            raise RuntimeError(f"losses differ, so no peak counts: {name} {results}")
    formula = {}
    for reshards, names in ((True, (OURS, SENT)), (False, (OURS_WHOLE, SENT_WHOLE))):
        formula |= dict.fromkeys(names, max(peaks(sizes_of(ranks, reshards=reshards))))
    print(report(results, formula), file=sys.stderr, flush=True)
    figures: dict[str, Any] = {name: peak._asdict() for name, peak in results.items()}
    for name, expected in formula.items():
        figures[name]["formula"] = expected
    return figures


def report(results: dict[str, Peak], formula: dict[str, float]) -> str:
    """Return a table of peaks, and of the ratios that have a target."""
    lines = [f"{WIDTH_512.name}, MiB", f"{'':<34}{'peak':>8}{'formula':>10}{'at rest':>10}"]
    for name, peak in results.items():
        mib = [each / 2**20 for each in peak[:2]]
        expected = f"{formula[name] / 2**20:.1f}" if name in formula else ""
        lines.append(f"  {name:<32}{mib[0]:>8.1f}{expected:>10}{mib[1]:>10.1f}")
    for ours, peer, target in TARGETS:
        ratio = results[ours].resident / results[peer].resident
        lines.append(f"  {f'{ours} / {peer}':<64}{ratio:>6.3f}   target {target:.2f}")
    for name, expected in formula.items():
        ratio = results[name].resident / expected
        lines.append(f"  {f'peak memory of {name}: measured / formula':<64}{ratio:>6.3f}")
    return "\n".join(lines)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.ranks)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
