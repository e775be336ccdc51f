"""How much memory does a training step take, at most?

    python tests/benchmarks/memory.py [--ranks 2] [--json]

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
    WIDTH_512,
)
from tests.benchmarks.rounds import on_ranks

EVERYBODY = (DDP, FSDP1, PEER, OURS, PEER_WHOLE, OURS_WHOLE)
WARM_UP, STEPS = 3, 5
TARGETS = ((OURS, PEER, 1.00), (OURS_WHOLE, PEER_WHOLE, 1.00))


class Peak(NamedTuple):
    """What one contender took."""

    resident: int  # bytes
    at_rest: int  # bytes that are resident after the step
    loss: float


def resident(what: str) -> int:
    """Return a figure of the kernel on this process, in bytes: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def measure(name: str) -> Peak:
    """Train with one contender and look at the last steps.

    **Collective:** all ranks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batch = WIDTH_512.make_batch(dist.get_rank())
    nothing = torch.nn.Linear(8, 8)  # what torch loads with the first step is nobody's
    contenders.make_optimizer(nothing)
    nothing(torch.ones(1, 8)).sum().backward()
    before = resident("VmRSS")
    step = contenders.trainer(contenders.make(name, WIDTH_512, mesh), batch)
    for _ in range(WARM_UP):
        step()
    peaks = []
    for _ in range(STEPS):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        loss = step()
        peaks.append(resident("VmHWM") - before)
    at_rest = resident("VmRSS") - before
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    return Peak(
        int(statistics.median(peaks)),
        at_rest,
        mean.item() / dist.get_world_size(),
    )


def run(ranks: int = 2) -> dict[str, Any]:
    """Measure everybody; return the figures.

    Raises:
        RuntimeError: The losses differ.
    """
    # For the processes that start now: glibc would keep what is freed, by a rule that adapts.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    peaks = {name: on_ranks(measure, name, ranks) for name in EVERYBODY}
    for name, peak in peaks.items():
        if abs(peak.loss - peaks[PEER].loss) > 1e-4 * peaks[PEER].loss:
            raise RuntimeError(f"losses differ, so no peak counts: {name} {peaks}")
    print(report(peaks), file=sys.stderr, flush=True)
    return {name: peak._asdict() for name, peak in peaks.items()}


def report(peaks: dict[str, Peak]) -> str:
    """Return a table of peaks, and of the ratios that have a target."""
    lines = [f"{WIDTH_512.name}, MiB", f"{'':<30}{'peak':>8}{'at rest':>10}"]
    for name, peak in peaks.items():
        mib = [each / 2**20 for each in peak[:2]]
        lines.append(f"  {name:<28}{mib[0]:>8.1f}{mib[1]:>10.1f}")
    for ours, peer, target in TARGETS:
        ratio = peaks[ours].resident / peaks[peer].resident
        lines.append(f"  {f'{ours} / {peer}':<56}{ratio:>6.3f}   target {target:.2f}")
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
