"""Benchmarks: one by its name, or all comparisons, as tables and as a picture.

python -m tests.benchmarks                      # all, into build/benchmarks, in fifteen minutes
python -m tests.benchmarks step_time --rounds 5 # one; --help has its options
"""

import argparse
import contextlib
import inspect
import io
import os
import platform
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.benchmarks import (
    checkpoint_time,
    collectives,
    cpu_time,
    growth,
    host_time,
    init_time,
    memory,
    overlap,
    owner_step,
    step_time,
    walks,
    weights_memory,
)
from tests.benchmarks.contenders import COMPUTE, OURS, PEER, PLAIN, SENT

COMPARISONS = (step_time, cpu_time, host_time, memory, collectives, init_time, overlap)
OTHERS = (checkpoint_time, growth, owner_step, walks, weights_memory)
# From below: the floor, meshard with both of its ways to be faster, and with one of them at a time;
# on top the peer.
BARS = {
    COMPUTE: "the same compute alone",
    OURS: "meshard, local_optimizer",
    PLAIN: "meshard, plain AdamW",
    SENT: "meshard, local, sockets",
    PEER: "FSDP2 (fully_shard)",
}


def draw(configurations, path):
    """Draw five step times as bars, one row per configuration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.7 * len(configurations)), layout="constrained")
    for place, (name, quartiles) in enumerate(configurations.items()):
        axes = figure.add_subplot(len(configurations), 1, place + 1)
        medians = [quartiles[contender][1] for contender in BARS]
        colours = ["#1f6f8b" if n.startswith("meshard") else "#b8b8b8" for n in BARS]
        bars = axes.barh(list(BARS.values()), medians, color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=4, fontsize=8)
        axes.set_title(f"{name}: milliseconds per step, resharding, median", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=120)


def run_comparisons(folder):
    """Write tables.txt and step_time.png."""
    folder.mkdir(parents=True, exist_ok=True)
    cores = f"{os.cpu_count()} cores, one per rank"
    tables = [f"torch {torch.__version__}, {platform.machine()}, {cores}\n"]
    for module in COMPARISONS:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            times = module.run()
        tables.append(text.getvalue())
        print(tables[-1], flush=True)
        if module is step_time:
            draw(times, folder / "step_time.png")
    (folder / "tables.txt").write_text("\n".join(tables))


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    names = parser.add_subparsers(metavar="NAME")
    for module in (*COMPARISONS, *OTHERS):
        name, page = module.__name__.rpartition(".")[2], module.__doc__
        one = names.add_parser(name, help=page.splitlines()[0], description=page)
        one.set_defaults(run=module.run)
        for option, parameter in inspect.signature(module.run).parameters.items():
            value = parameter.default
            one.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)
    args = vars(parser.parse_args())
    folder, run = args.pop("out"), args.pop("run", None)
    run_comparisons(folder) if run is None else run(**args)


if __name__ == "__main__":
    main()
