"""Run a script twice under torchrun: with torch's fully_shard and DistributedDataParallel, and with
meshard's fully_shard and replicate in their place. Then say whether losses, gradients and weights
are equal to the last bit, what differs first, and what each run took. After --steps optimizer
steps a run ends as by sys.exit(). What the script prints goes to stderr. The exit code is 0 if no
relative difference (of losses, and of norms of gradients and weights) is more than --rtol, and 1 if
one is, or if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from meshard._compare.record import Record
from meshard._compare.report import lines_of, summarize

_NOTHING = (
    "nothing was sharded: the script must call torch's fully_shard, or DistributedDataParallel and "
    "no --accuracy. (accelerate shards on devices only; FSDP1 is not compared.)"
)


def _run(name: str, given: argparse.Namespace) -> list[Record]:
    """Run the script; return the records of all ranks. Raise a ValueError if it fails."""
    script = [given.training_script, *given.training_script_args]
    print(f"compare: run {name!r} of {' '.join(script)}", file=sys.stderr, flush=True)
    args, kind = copy.copy(given), "module" if given.module else "file"
    with tempfile.TemporaryDirectory() as folder:
        args.module, args.training_script = True, "meshard._compare.rank"
        args.training_script_args = [name, folder, str(given.steps), kind, *script]
        failure = ""
        try:
            torchrun.run(args)
        except ChildFailedError as error:
            failure = error.format_msg()
        records = [pickle.loads(each.read_bytes()) for each in Path(folder).iterdir()]
    failed = min((each for each in records if each.error), key=lambda x: x.failed_at, default=None)
    if failed is not None:
        where = f"on rank {failed.rank}, after {len(failed.steps)} steps"
        raise ValueError(f"the run {name!r} failed {where}:\n{failed.error}")
    if failure:
        raise ValueError(f"the run {name!r} failed without an exception:\n{failure}")
    if not records or not records[0].steps:
        raise ValueError(f"in the run {name!r} the script called step() of no optimizer.")
    if not records[0].num_units:
        raise ValueError(f"in the run {name!r} {_NOTHING}")
    return sorted(records, key=lambda each: each.rank)


def run(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.description = "python -m meshard compare", __doc__
    add = parser.add_argument_group("options of compare").add_argument
    add("--steps", type=int, default=5, help="steps of optimizers in each run (default: 5)")
    add("--rtol", type=float, default=1e-3, help="for the exit code (default: 1e-3)")
    add("--json", action="store_true", help="print the report as JSON")
    add("--accuracy", action="store_true", help="say how far both are from a run in float64")
    given = parser.parse_args(arguments)
    if given.nnodes not in ("1", "1:1"):
        raise ValueError("compare runs on one host: leave out --nnodes.")
    given.local_addr = given.local_addr or "127.0.0.1"
    os.environ.setdefault("PYTHONHASHSEED", "0")
    runs = {library: _run(library, given) for library in ("torch", "meshard")}
    if given.accuracy:
        runs["float64"] = _run("float64", given)
    summary = summarize(runs, given.rtol)
    if not summary["equal"]:  # because of the library, or in each run?
        runs["torch again"] = _run("torch again", given)
        summary = summarize(runs, given.rtol)
    if given.json:  # which has no numbers that are not finite
        print(json.dumps(json.loads(json.dumps(summary), parse_constant=str), indent=2))
    else:
        print("\n".join(lines_of(summary)))
    return 0 if summary["largest difference"] <= given.rtol else 1
