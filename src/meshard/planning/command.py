"""``python -m meshard plan``: plan a job from a shell, before it is submitted."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import meshard
from meshard.diagnostics import aligned
from meshard.planning.plan import bytes_of, plan
from meshard.planning.report import readable_size, screen_of
from meshard.planning.sweep import MakeJob, SweepRow, check_some, fit, sweep

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
    job = _job_of(parsed.job, dict(map(_setting, parsed.set)), parsed.sweep)
    options: dict[str, Any] = {
        "rank": parsed.rank,
        "ranks_per_node": parsed.node,
        "device_type": parsed.device,
        "steps": parsed.steps,
    }
    if not parsed.sweep and not parsed.fit:
        return _show(parsed, plan(job, world_size=parsed.world, **options))
    values = dict(map(_values, parsed.sweep))
    if len(values) < len(parsed.sweep):
        raise ValueError("two --sweep have the same key; write KEY=A,B.")
    if parsed.plot:
        raise ValueError("--plot draws one plan; leave out --sweep and --fit, or --plot.")
    if parsed.fit and parsed.json:
        raise ValueError("--fit prints no JSON; use --sweep with --json.")
    options |= {"world_size": parsed.world, "on_row": _counter()}
    if parsed.fit:
        smallest, cheapest = fit(job, values, limit=parsed.fit, **options)
        return _show_fit(parsed, smallest, cheapest)
    rows = sweep(job, values, limit=parsed.limit, **options)
    if parsed.json:
        # A setting may be any literal of Python. What JSON does not have, such as a set, is written
        # as text.
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1, default=str))
    else:
        print(_table(rows, parsed.limit))
    check_some(rows)
    return 0 if rows[0].fits(parsed.limit) else 1


def _show(parsed: argparse.Namespace, planned: Any) -> int:
    limit = None if parsed.limit is None else bytes_of(parsed.limit)
    print(planned.to_json() if parsed.json else screen_of(planned, limit))
    if parsed.plot:
        planned.plot(parsed.plot)
    return 0 if limit is None or planned.fits(limit) else 1


def _show_fit(
    parsed: argparse.Namespace, smallest: SweepRow | None, cheapest: SweepRow | None
) -> int:
    if smallest is None or cheapest is None:
        print(f"nothing fits into {parsed.fit} on {parsed.world} ranks; try more ranks, or --sweep")
        return 1
    print(f"smallest world into which it fits: {smallest.world_size} ranks")
    print(_table([smallest], parsed.fit))
    print()
    print(f"cheapest setting on {cheapest.world_size} ranks")
    print(_table([cheapest], parsed.fit))
    return 0


def _counter() -> Callable[[SweepRow], None]:
    """Return what shows on a terminal how many plans are done."""
    done = itertools.count(1)

    def on_row(_: SweepRow) -> None:
        if sys.stderr.isatty():  # what is printed next overwrites it
            print(f"{next(done)} plans", end="\r", file=sys.stderr, flush=True)

    return on_row


def _table(rows: list[SweepRow], limit: str | None) -> str:
    keys = list(rows[0].settings)
    heads = ["peak", "peak in", "sent", "between nodes", ""]
    lines: list[tuple[str, ...]] = [(*keys, *heads)]
    for row in rows:
        values = [str(row.settings[key]) for key in keys]
        if row.plan is None:
            error = row.error.partition("\n")[0][:60]
            lines.append((*values, *[""] * (len(heads) - 1), error))
            continue
        sent = row.plan.wire_bytes, row.plan.wire_bytes_between_nodes
        sizes = map(readable_size, sent)
        verdict = "" if limit is None else "fits" if row.fits(limit) else "does not fit"
        peak = readable_size(row.plan.peak_bytes)
        lines.append((*values, peak, row.plan.peak_phase, *sizes, verdict))
    return "\n".join(aligned(lines))


def _job_of(name: str, settings: dict[str, Any], swept: list[str]) -> MakeJob:
    """Return the job with its settings, after a look at whether it takes them."""
    package, _, function_name = name.partition(":")
    if not function_name:
        raise ValueError(f"a job is PKG:FUNCTION, such as train:job, got {name!r}.")
    sys.path.insert(0, os.getcwd())  # as for `python -m`, in a console script too
    function = getattr(importlib.import_module(package), function_name, None)
    if not callable(function):
        raise ValueError(f"{package} has no function {function_name!r}.")
    taken = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    for key in (*settings, *(each.partition("=")[0] for each in swept)):
        if key not in taken and not takes_any:
            raise ValueError(f"the job takes no {key!r}; it takes {', '.join(taken) or 'nothing'}.")
    return partial(function, **settings)


def _setting(text: str) -> tuple[str, Any]:
    key, has_value, value = text.partition("=")
    if not has_value:
        raise ValueError(f"a setting is KEY=VALUE, got {text!r}.")
    return key, _parsed(value)


def _values(text: str) -> tuple[str, list[Any]]:
    key, has_values, values = text.partition("=")
    if not has_values or not values:
        raise ValueError(f"a sweep is KEY=A,B, got {text!r}.")
    return key, [_parsed(each) for each in values.split(",")]


def _parsed(text: str) -> Any:
    """Return a number, True, False or None that ``text`` spells, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
