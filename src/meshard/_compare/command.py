"""Run a script twice under torchrun: with torch's fully_shard and DistributedDataParallel, and with
meshard's fully_shard and replicate in their place. Then say whether losses, gradients and weights
are equal to the last bit, what differs first, and what each run took. After --steps optimizer
steps a run ends as by sys.exit(). What the script prints goes to stderr. The exit code is 0 if no
relative difference (of losses, and of norms of gradients and weights) is more than --rtol, and 1 if
one is, or if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.run import get_args_parser

from meshard._compare.record import Record
from meshard._compare.report import lines_of, summarize

_RENDEZVOUS = ("--standalone", "--rdzv", "--master", "--nnodes", "--node")
_NOTHING = (
    "nothing was sharded: the script must call torch's fully_shard or DistributedDataParallel. "
    "(accelerate shards on devices only; FSDP1 is not compared.)"
)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return all that was given, torchrun's part of it, and the script with its arguments."""
    parser, own = get_args_parser(), argparse.ArgumentParser(add_help=False)
    for each in (parser, own):
        each.allow_abbrev = False
        add = each.add_argument_group("options of compare").add_argument
        add("--steps", type=int, default=5, help="steps of optimizers in each run (default: 5)")
        add("--rtol", type=float, default=1e-3, help="for the exit code (default: 1e-3)")
        add("--json", action="store_true", help="print the report as JSON")
        add("--accuracy", metavar="ARGS", help="of the script, for a third run, in float64")
    parser.prog, parser.description = "python -m meshard compare", __doc__
    given = parser.parse_args(arguments)
    script = [given.training_script, *given.training_script_args]
    torchrun = own.parse_known_args(arguments[: -len(script)])[1]
    if not any(each.startswith(_RENDEZVOUS) for each in torchrun):
        torchrun = ["--standalone", "--local-addr=127.0.0.1", *torchrun]
    return given, torchrun, script


def _run(
    name: str, library: str, given: argparse.Namespace, torchrun: list[str], script: list[str]
) -> list[Record]:
    """Run the script; return the records of all ranks. Raise a ValueError if it fails."""
    print(f"compare: run {name!r} of {' '.join(script)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rank = ["meshard._compare.rank", name, library, folder, str(given.steps)]
        rank = [*rank, "module" if given.module else "file"]
        launch = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--module"]
        environment = {"PYTHONHASHSEED": "0"} | os.environ
        code = subprocess.call([*launch, *rank, *script], stdout=2, env=environment)  # 2: stderr
        records = [pickle.loads(each.read_bytes()) for each in Path(folder).iterdir()]
    failed = min((each for each in records if each.error), key=lambda x: x.failed_at, default=None)
    if failed is not None:
        where = f"on rank {failed.rank}, after {len(failed.steps)} steps"
        raise ValueError(f"the run {name!r} failed {where}:\n{failed.error}")
    if code:
        raise ValueError(f"the run {name!r} failed with exit code {code} and without an exception.")
    if not records or not records[0].steps:
        raise ValueError(f"in the run {name!r} the script called step() of no optimizer.")
    if not records[0].num_units:
        raise ValueError(f"in the run {name!r} {_NOTHING}")
    return records


def run(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    given, torchrun, script = _parse(arguments)
    runs = {each: _run(each, each, given, torchrun, script) for each in ("torch", "meshard")}
    if given.accuracy is not None:
        precise = [*script, *given.accuracy.split()]
        runs["float64"] = _run("float64", "torch", given, torchrun, precise)
    summary = summarize(runs, given.rtol)
    if not summary["equal"]:  # because of the library, or in each run?
        runs["torch again"] = _run("torch again", "torch", given, torchrun, script)
        summary = summarize(runs, given.rtol)
    print(json.dumps(summary, indent=2) if given.json else "\n".join(lines_of(summary)))
    return 0 if summary["largest difference"] <= given.rtol else 1
