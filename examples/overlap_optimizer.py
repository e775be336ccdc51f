"""Memory of an optimizer in backward: two ranks train one step both ways.

python examples/overlap_optimizer.py
"""

from __future__ import annotations

import os
import time
import weakref
from argparse import Namespace
from pathlib import Path

# torch.profiler would report its start and its end, and memory that is older than it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from command_line import count, make_parser, new_file, parse
from extras import Figure
from launch import launch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from meshard import fully_shard, overlap_optimizer

MIB = 2**20
COLOURS = {"ordinary": "#c44e52", "overlapped": "#4c72b0"}


class GradientMeter:
    """Counts the bytes of sharded gradients that are alive, over time."""

    def __init__(self, model: nn.Module) -> None:
        self._begin = time.perf_counter()
        self._live = 0
        self.points: list[tuple[float, int]] = [(0.0, 0)]
        self._handles = [
            param.register_post_accumulate_grad_hook(self._arrived) for param in model.parameters()
        ]

    def _arrived(self, param: torch.Tensor) -> None:
        gradient = param.grad
        if isinstance(gradient, DTensor):
            num_bytes = gradient.to_local().untyped_storage().nbytes()
            self._change(num_bytes)
            weakref.finalize(gradient, self._change, -num_bytes)

    def _change(self, num_bytes: int) -> None:
        self._live += num_bytes
        self.points.append((time.perf_counter() - self._begin, self._live))

    @property
    def live(self) -> int:
        """Bytes that are alive now."""
        return self._live

    @property
    def most(self) -> int:
        """The most that were alive at a time."""
        return max(live for _, live in self.points)

    def stop(self) -> None:
        """Look at no further gradients."""
        for handle in self._handles:
            handle.remove()


def build(args: Namespace, device: torch.device) -> nn.Module:
    """Return a model of equal units, the same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.depth)]
    model = nn.Sequential(*layers).to(device)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def peak_of(profiler: profile) -> int:
    """Return the most that was allocated on the CPU while ``profiler`` looked, beside the rest."""
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def measure(args: Namespace, device: torch.device, kind: str) -> dict[str, object]:
    """Train a few steps; watch the last one."""
    model = build(args, device)
    if kind == "overlapped":
        optimizer: torch.optim.Optimizer = overlap_optimizer(model, torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    found: dict[str, object] = {}
    for step in range(args.steps):
        batch = torch.randn(8, args.width, generator=generator).to(device)
        is_watched = step == args.steps - 1
        meter = GradientMeter(model) if is_watched and args.watch == "gradients" else None
        is_profiled = is_watched and args.watch == "memory"
        loss = model(batch).square().mean()
        if is_profiled:
            torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
            profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            profiler.__enter__()
        loss.backward()
        if meter is not None:
            found["left"] = meter.live
        optimizer.step()
        if is_profiled:
            profiler.__exit__(None, None, None)
            is_cuda = device.type == "cuda"
            found["peak"] = torch.cuda.max_memory_allocated() if is_cuda else peak_of(profiler)
        optimizer.zero_grad()
        if meter is not None:
            meter.stop()
            found["most"], found["points"] = meter.most, meter.points
    found["weight"] = next(model.parameters()).full_tensor()
    return found


def plot(results: dict[str, dict[str, object]], path: Path) -> None:
    """Draw the live gradient bytes of a step over its time."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for kind, found in results.items():
        points: list[tuple[float, int]] = found["points"]  # type: ignore[assignment]
        times = [1e3 * when for when, _ in points]
        axes.step(
            times,
            [live / MIB for _, live in points],
            where="post",
            label=kind,
            color=COLOURS[kind],
        )
    axes.set(xlabel="ms since the step began", ylabel="live gradients, MiB per rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def run(args: Namespace, device: torch.device) -> None:
    """Train both ways on this rank; the first one prints and draws."""
    results: dict[str, dict[str, object]] = {}
    for kind in COLOURS:
        results[kind] = {}
        for args.watch in ("gradients", "memory"):  # to profile takes time, and memory
            results[kind] |= measure(args, device, kind)
    if dist.get_rank():
        return
    head = ("", "gradients at most", "after backward", "peak of the step")
    print("".join(f"{cell:>20}" for cell in head))
    for kind, found in results.items():
        row = (kind, *(f"{found[key] / MIB:.1f} MiB" for key in ("most", "left", "peak")))  # type: ignore[operator]
        print("".join(f"{cell:>20}" for cell in row))
    weights = [found["weight"] for found in results.values()]
    is_same = torch.equal(weights[0], weights[1])  # type: ignore[arg-type]
    print(f"\nsame weights, bit for bit: {'yes' if is_same else 'NO'}")
    plot(results, args.plot)
    print(f"live gradients over one step: {args.plot}")


def main() -> None:
    """Read the command line and start the ranks."""
    parser = make_parser(__doc__.split("\n")[0], ranks=2)
    add = parser.add_argument
    add("--depth", type=count, default=12, help="layers of the model, each a unit")
    add("--width", type=count, default=1024, help="of the model")
    add("--steps", type=count, default=3, help="of which the last is watched")
    add("--plot", type=new_file, default=Path("gradients.png"), help="draw the gradients here")
    launch(run, parse(parser))


if __name__ == "__main__":
    main()
