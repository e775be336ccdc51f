"""Run all benchmarks, and write what they say as tables and as a picture.

    python tests/benchmarks/all.py [--out build/benchmarks]

Takes some ten minutes on two cores. Nothing else should run meanwhile; what runs anyway falls on
all contenders alike.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import (
    collectives,
    cpu_time,
    host_time,
    init_time,
    memory,
    overlap,
    step_time,
)
from tests.benchmarks.contenders import COMPUTE, OURS, PEER, PLAIN, SENT

BENCHMARKS = {
    "step_time": step_time.run,
    "cpu_time": cpu_time.run,
    "host_time": host_time.run,
    "memory": memory.run,
    "collectives": collectives.run,
    "init_time": init_time.run,
    "overlap": overlap.run,
}


class _Tee(io.TextIOBase):
    """Writes to two streams."""

    def __init__(self, *streams: Any) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


# From below: the floor, meshard with both of its ways to be faster, and with one of them at a time;
# on top the peer.
BARS = {
    COMPUTE: "the same compute alone",
    OURS: "meshard, flat_optimizer",
    PLAIN: "meshard, plain AdamW",
    SENT: "meshard, flat, sockets",
    PEER: "FSDP2 (fully_shard)",
}


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw five step times as bars, one row per configuration."""
    configurations = figures["step_time"]
    figure = Figure(figsize=(8, 1.7 * len(configurations)), layout="constrained")
    for place, (name, each) in enumerate(configurations.items()):
        axes = figure.add_subplot(len(configurations), 1, place + 1)
        medians = [each["milliseconds"][contender]["median"] for contender in BARS]
        colours = ["#1f6f8b" if n.startswith("meshard") else "#b8b8b8" for n in BARS]
        bars = axes.barh(list(BARS.values()), medians, color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=4, fontsize=8)
        axes.set_title(f"{name}: milliseconds per step, resharding, median", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--only", nargs="*", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start, text, figures = time.monotonic(), io.StringIO(), {}
    with contextlib.redirect_stderr(_Tee(sys.stderr, text)):  # type: ignore[type-var]
        for name in args.only:
            figures[name] = BENCHMARKS[name]()
            print(file=sys.stderr)
    minutes = (time.monotonic() - start) / 60
    about = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one per rank"
    (args.out / "tables.txt").write_text(f"{about}\n\n{text.getvalue()}")
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
    if "step_time" in figures:
        draw(figures, args.out / "step_time.png")
    print(f"{minutes:.1f} minutes; in {args.out}: tables.txt, figures.json, step_time.png")


if __name__ == "__main__":
    main()
