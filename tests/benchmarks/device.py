"""Time of a step on a CUDA device and its host, against torch's fully_shard.

    python tests/benchmarks/device.py [--rounds 15] [--json]
    torchrun --nproc-per-node 4 tests/benchmarks/device.py --backend gloo   # ranks on one device

Per step of a GPT in bfloat16, on as many ranks as torchrun has started (one by default): host time
of forward, backward and optimizer before the device is waited for; microseconds of kernels that
only copy; peak memory; and for how long kernels of two streams run at once. Losses must agree.
Where communication goes is asked by ``network.py --device cuda``, for any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE, Configuration

EVERYBODY = (PEER, OURS, PEER_WHOLE, OURS_WHOLE)
CONFIGURATION = Configuration("width 2048, batch 4 x 1024", 2048, 4, 1024, narrow=True)
WARM_UP = 5
_TOLERANCE = 2e-2  # bfloat16, over all steps
_COPIES = ("copy", "split", "cat", "memcpy", "memset")


def host_times(
    steps: dict[str, Callable[[], object]],
    rounds: int,
    synchronize: Callable[[], object] = torch.cuda.synchronize,
) -> dict[str, float]:
    """Return the median milliseconds until a step is queued, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(WARM_UP + rounds):
        for name, step in steps.items():
            synchronize()
            start = time.perf_counter()
            step()
            if round_number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    synchronize()
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that tensors of this process had in a step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def kernels_of(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the device's events of a step: name, begin and duration in us, and stream."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [event for event in events if event.get("cat") in kinds]


def copying(events: list[dict[str, Any]]) -> float:
    """Return the microseconds of kernels that only copy."""
    return sum(
        event["dur"] for event in events if any(part in event["name"].lower() for part in _COPIES)
    )


def overlapped(events: list[dict[str, Any]]) -> float:
    """Return the microseconds during which kernels of at least two streams run.

    >>> overlapped([
    ...     {"ts": 0.0, "dur": 10.0, "args": {"stream": 7}},
    ...     {"ts": 4.0, "dur": 2.0, "args": {"stream": 7}},
    ...     {"ts": 8.0, "dur": 5.0, "args": {"stream": 20}},
    ... ])
    2.0
    """
    moments = []
    for event in events:
        stream = event["args"]["stream"]
        moments.append((event["ts"], 1, stream))
        moments.append((event["ts"] + event["dur"], -1, stream))
    running: dict[int, int] = {}
    total = since = 0.0
    for moment, change, stream in sorted(moments):
        if sum(count > 0 for count in running.values()) > 1:
            total += moment - since
        running[stream] = running.get(stream, 0) + change
        since = moment
    return total


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Measure everybody.

    **Collective:** all ranks.

    Raises:
        RuntimeError: The losses differ, so nothing counts.
    """
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    device = torch.device("cuda", torch.cuda.current_device())
    tokens, following = (each.to(device) for each in CONFIGURATION.make_batch(dist.get_rank()))
    steps: dict[str, Callable[[], float]] = {}
    figures: dict[str, dict[str, float]] = {}
    for name in EVERYBODY:  # alone, so that nobody else's memory counts
        model = contenders.make(name, CONFIGURATION, mesh, device)
        step = contenders.trainer(model, (tokens, following))
        losses = [step() for _ in range(WARM_UP)]
        figures[name] = {"peak": peak_bytes(step), "loss": losses[-1]}
        del model, step
        torch.cuda.empty_cache()
    for name in EVERYBODY:
        if abs(figures[name]["loss"] - figures[PEER]["loss"]) > _TOLERANCE * figures[PEER]["loss"]:
            raise RuntimeError(f"losses differ, so nothing counts: {figures}")
        model = contenders.make(name, CONFIGURATION, mesh, device)
        # Without .item(), which waits for the device.
        steps[name] = contenders.trainer(model, (tokens, following), read=lambda loss: 0.0)
    for name, milliseconds in host_times(steps, rounds).items():
        events = kernels_of(steps[name])
        figures[name] |= {
            "host": milliseconds,
            "copying": copying(events),
            "overlapped": overlapped(events),
            "streams": len({event["args"]["stream"] for event in events}),
        }
    return figures


def report(figures: dict[str, dict[str, float]]) -> str:
    """Return a table, with ratios to the peer."""
    heads = ("host ms", "copy us", "peak MiB", "two streams us", "streams")
    lines = [CONFIGURATION.name, " " * 30 + "".join(f"{head:>16}" for head in heads)]
    for name, each in figures.items():
        values = (each["host"], each["copying"], each["peak"] / 2**20, each["overlapped"])
        row = "".join(f"{value:>16.1f}" for value in values)
        lines.append(f"  {name:<28}{row}{each['streams']:>16.0f}")
    for ours, peer in ((OURS, PEER), (OURS_WHOLE, PEER_WHOLE)):
        for what in ("host", "copying", "peak"):
            ratio = figures[ours][what] / figures[peer][what]
            lines.append(f"  {f'{what}: {ours} / {peer}':<62}{ratio:>6.2f}")
    return "\n".join(lines)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing was measured.", file=sys.stderr)
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    if "RANK" in os.environ:
        dist.init_process_group(args.backend)
    else:
        store = dist.HashStore()
        dist.init_process_group(args.backend, store=store, rank=0, world_size=1)
    try:
        figures = measure(args.rounds)
        if dist.get_rank() == 0:
            print(report(figures), file=sys.stderr, flush=True)
            if args.json:
                print(json.dumps(figures))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
