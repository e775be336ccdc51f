"""Benchmarks: one by its name, or all comparisons, as tables and as a picture.

python -m tests.benchmarks                      # all, into build/benchmarks, in fifteen minutes
python -m tests.benchmarks step_time --rounds 5 # one; --help has its options
python -m tests.benchmarks growth --json        # with its figures on stdout
"""

import argparse
import contextlib
import inspect
import io
import json
import os
import platform
import sys
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
    network,
    overlap,
    step_time,
    walks,
    weights_memory,
)
from tests.benchmarks.contenders import COMPUTE, OURS, PEER, PLAIN, SENT

COMPARISONS = (step_time, cpu_time, host_time, memory, collectives, init_time, overlap)
OTHERS = (checkpoint_time, growth, network, walks, weights_memory)
# From below: the floor, meshard with both of its ways to be faster, and with one of them at a time;
# on top the peer.
BARS = {
    COMPUTE: "the same compute alone",
    OURS: "meshard, flat_optimizer",
    PLAIN: "meshard, plain AdamW",
    SENT: "meshard, flat, sockets",
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
    """Write tables.txt, figures.json and step_time.png."""
    folder.mkdir(parents=True, exist_ok=True)
    cores = f"{os.cpu_count()} cores, one per rank"
    tables, figures = [f"torch {torch.__version__}, {platform.machine()}, {cores}\n"], {}
    for module in COMPARISONS:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            figures[module.__name__.rpartition(".")[2]] = module.run()
        tables.append(text.getvalue())
        print(tables[-1], file=sys.stderr, flush=True)
    (folder / "tables.txt").write_text("\n".join(tables))
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    draw(figures["step_time"], folder / "step_time.png")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    names = parser.add_subparsers(metavar="NAME")
    for module in (*COMPARISONS, *OTHERS):
        name, page = module.__name__.rpartition(".")[2], module.__doc__
        one = names.add_parser(name, help=page.splitlines()[0], description=page)
        one.set_defaults(run=module.run)
        one.add_argument("--json", action="store_true", help="print the figures to stdout")
        for option, parameter in inspect.signature(module.run).parameters.items():
            value = parameter.default
            if value is False:
                how = {"action": "store_true"}
            elif isinstance(value, tuple):
                how = {"nargs": "+", "type": type(value[0]), "default": value}
            else:
                how = {"type": type(value), "default": value}
            one.add_argument(f"--{option.replace('_', '-')}", **how)
    args = vars(parser.parse_args())
    folder, run, as_json = args.pop("out"), args.pop("run", None), args.pop("json", False)
    if run is None:
        run_comparisons(folder)
        return
    figures = run(**args)
    if as_json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
