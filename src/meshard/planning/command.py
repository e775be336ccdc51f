"""``python -m meshard plan``: plan a job from a shell, before it is submitted."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import os
import sys
import traceback
from functools import partial
from typing import Any

import torch

import meshard
from meshard.diagnostics import aligned
from meshard.planning.plan import bytes_of, plan
from meshard.planning.report import readable_size, screen_of
from meshard.planning.sweep import SweepRow, check_some, fit, sweep

_EXAMPLES = """\
examples:
  python -m meshard plan train:job --world 256 --limit 80GB
  python -m meshard plan train:job --world 256 --set batch=4 --plot out.png
  python -m meshard plan train:job --world 64 --sweep replicas=1,2
  python -m meshard plan train:job --world 64 --fit 80GB

The exit code is 0 if the plan fits into --limit or --fit, or if there is neither; 1 if it does not
fit; 2 if the command or the job is not right.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("job", metavar="PKG:FUNCTION", help="it makes a model and returns a step")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="how many ranks")
    parser.add_argument("--rank", type=int, default=0, help="which of them (0)")
    parser.add_argument("--node", type=int, default=8, metavar="N", help="ranks of a node (8)")
    parser.add_argument("--device", default="cuda", metavar="TYPE", help="of the ranks (cuda)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="to run (2)")
    parser.add_argument("--limit", metavar="SIZE", help="memory of a rank, such as 80GB")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an argument of the job"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B", help="plan all these values"
    )
    parser.add_argument("--fit", metavar="SIZE", help="find what fits into this memory")
    parser.add_argument(
        "--json", action="store_true", help="print the plan, or all plans of a sweep, as JSON"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of a step")


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    try:
        return _run(parsed)
    except (Exception, SystemExit) as error:  # 1 would say that it does not fit
        print(f"error: {type(error).__name__}: {error}{_place_of(error)}", file=sys.stderr)
        return 2


def _place_of(error: BaseException) -> str:
    """Return where in the code of the user an exception was raised, if it was."""
    libraries = tuple(os.path.dirname(str(each.__file__)) for each in (meshard, torch, os))
    frames = traceback.extract_tb(error.__traceback__)
    found = [each for each in frames if not each.filename.startswith((*libraries, "<"))]
    return f" ({found[-1].filename}:{found[-1].lineno})" if found else ""


def _run(parsed: argparse.Namespace) -> int:
    settings = {key: _parsed(value) for key, value in map(_setting, parsed.set)}
    job = partial(_job_of(parsed.job), **settings)
    options: dict[str, Any] = {
        "world_size": parsed.world,
        "rank": parsed.rank,
        "ranks_per_node": parsed.node,
        "device_type": parsed.device,
        "steps": parsed.steps,
    }
    texts = dict(map(_setting, parsed.sweep))
    swept = {key: [_parsed(each) for each in text.split(",")] for key, text in texts.items()}
    if len(swept) < len(parsed.sweep):
        raise ValueError("two --sweep have the same key; write KEY=A,B.")
    if parsed.plot and (swept or parsed.fit):
        raise ValueError("--plot draws one plan; leave out --sweep and --fit, or --plot.")
    if parsed.fit:
        if parsed.json:
            raise ValueError("--fit prints no JSON; use --sweep with --json.")
        smallest, cheapest = fit(job, swept, limit=parsed.fit, **options)
        if smallest is None or cheapest is None:
            print(f"nothing fits into {parsed.fit} on {parsed.world} ranks; try more, or --sweep")
            return 1
        print(f"smallest world into which it fits: {smallest.world_size} ranks")
        print(_table([smallest], parsed.fit))
        print(f"\ncheapest setting on {cheapest.world_size} ranks")
        print(_table([cheapest], parsed.fit))
        return 0
    limit = None if parsed.limit is None else bytes_of(parsed.limit)
    if swept:
        rows = sweep(job, swept, limit=limit, **options)
        if parsed.json:
            # A setting may be any literal of Python. What JSON does not have, such as a set, is
            # written as text.
            print(json.dumps(list(map(dataclasses.asdict, rows)), indent=1, default=str))
        else:
            print(_table(rows, limit))
        check_some(rows)
        return 0 if rows[0].fits(limit) else 1
    planned = plan(job, **options)
    print(planned.to_json() if parsed.json else screen_of(planned, limit))
    if parsed.plot:
        planned.plot(parsed.plot)
    return 0 if limit is None or planned.fits(limit) else 1


def _table(rows: list[SweepRow], limit: str | float | None) -> str:
    lines = [(*rows[0].settings, "peak", "peak in", "sent", "between nodes", "")]
    for row in rows:
        values = map(str, row.settings.values())
        if row.plan is None:
            lines.append((*values, "", "", "", "", row.error.partition("\n")[0][:60]))
            continue
        sent = row.plan.wire_bytes, row.plan.wire_bytes_between_nodes
        verdict = "" if limit is None else "fits" if row.fits(limit) else "does not fit"
        peak = readable_size(row.plan.peak_bytes), row.plan.peak_phase
        lines.append((*values, *peak, *map(readable_size, sent), verdict))
    return "\n".join(aligned(lines))


def _job_of(name: str) -> Any:
    package, _, function_name = name.partition(":")
    if not function_name:
        raise ValueError(f"a job is PKG:FUNCTION, such as train:job, got {name!r}.")
    sys.path.insert(0, os.getcwd())  # as for `python -m`, in a console script too
    function = getattr(importlib.import_module(package), function_name, None)
    if not callable(function):
        raise ValueError(f"{package} has no function {function_name!r}.")
    return function


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not value:
        raise ValueError(f"a setting is KEY=VALUE, and a sweep KEY=A,B; got {text!r}.")
    return key, value


def _parsed(text: str) -> Any:
    """Return a number, True, False or None that ``text`` spells, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
