"""A plan on one screen."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshard.planning.plan import Plan, PlannedUnit

WIDTH = 80
_NAMES = {  # of kinds, whose first letters stand in the bar
    "params": "shards of parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "unsharded": "unsharded parameters",
    "activations": "activations",
    "communication": "buffers of communication",
}


def readable_size(num_bytes: float) -> str:
    """Return a number of bytes in decimal units, as memory of devices is sold.

    >>> readable_size(25_700_000_000), readable_size(999), readable_size(1_500)
    ('25.7 GB', '999 B', '1.5 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def screen_of(plan: Plan, limit: int | None = None) -> str:
    """Return what a person wants to know of a plan, in lines of at most 80 characters."""
    return "\n".join(line[:WIDTH].rstrip() for line in _lines_of(plan, limit))


def _lines_of(plan: Plan, limit: int | None) -> Iterator[str]:
    peak = readable_size(plan.peak_bytes)
    peak_unit = _short(plan.peak_unit)
    where = f"{plan.peak_phase} of {peak_unit}" if peak_unit else plan.peak_phase
    yield f"rank {plan.rank} of {plan.world_size} on {plan.device_type}: peak {peak}, in {where}"
    if limit is not None:
        verdict = "fits" if plan.peak_bytes <= limit else "DOES NOT FIT"
        yield f"{verdict} in {readable_size(limit)} ({plan.peak_bytes / max(limit, 1):.0%})"
    yield ""
    totals = itertools.accumulate(plan.bytes_by_kind.values())
    ends = [0, *(round((WIDTH - 2) * total / plan.peak_bytes) for total in totals)]
    sizes = zip(plan.bytes_by_kind, itertools.pairwise(ends), strict=True)
    yield "[" + "".join(kind[0].upper() * (end - begin) for kind, (begin, end) in sizes) + "]"
    for kind, num_bytes in sorted(plan.bytes_by_kind.items(), key=lambda pair: -pair[1]):
        name, share = _NAMES[kind], num_bytes / plan.peak_bytes
        yield f"  {kind[0].upper()} {name:26}{readable_size(num_bytes):>10} {share:6.1%}"
    yield f"  state (parameters, gradients, optimizer) {readable_size(plan.state_bytes)} per rank"
    if plan.host_bytes:
        yield f"  host memory at most {readable_size(plan.host_bytes)}"
    padding = sum(unit.padding_bytes for unit in plan.units)
    if padding:
        yield f"  padding of all ranks together {readable_size(padding)}"
    yield ""
    yield f"{'each step sends':28}{'count':>7}{'payload':>12}{'sent':>12}{'between nodes':>16}"
    for op, one in plan.collectives.items():
        payload, sent = readable_size(one.payload_bytes), readable_size(one.wire_bytes)
        between = readable_size(one.wire_bytes_between_nodes)
        yield f"  {op:26}{one.count:>7}{payload:>12}{sent:>12}{between:>16}"
    if not plan.collectives:
        yield "  nothing"
    yield ""
    units = [each for each in plan.units if each.total]
    if plan.peak_phase == "set-up":
        units = []  # what was made before it was sharded belongs to none
        yield "the peak comes before the first step. What would help: make the model on the"
        yield "meta device, and call to_empty after sharding"
    elif units:
        yield "units that cost most at the peak, and what would help most:"
    for unit in sorted(units, key=lambda each: -each.total)[:3]:
        two = sorted(unit.bytes_by_kind.items(), key=lambda pair: -pair[1])[:2]
        parts = ", ".join(f"{kind} {readable_size(size)}" for kind, size in two if size)
        yield f"  {_short(unit.label):24}{readable_size(unit.total):>10}  {parts}"
        frees, advice = max(_changes(plan, unit), key=lambda change: change[0])
        yield f"    -{readable_size(frees)}: {advice}" if frees else "    nothing"
    yield ""
    yield "not known:"
    for sentence in plan.not_known:
        yield from textwrap.wrap(
            sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )


def _short(label: str) -> str:
    return label if len(label) <= 23 else f"...{label[-20:]}"


def _changes(plan: Plan, unit: PlannedUnit) -> Iterator[tuple[int, str]]:
    """Iterate over what a user can change, with the bytes that it frees at the peak."""
    kinds, is_running = unit.bytes_by_kind, unit.label == plan.peak_unit
    # ``kinds["grads"]`` counts all that backward has computed. What is more than the gradients of
    # parameters take are gradients of activations.
    of_params = min(kinds["grads"], unit.unsharded_bytes if is_running else unit.shard_bytes)
    activations = kinds["activations"] + kinds["grads"] - of_params
    yield activations // 2, "half the microbatch: twice as many of them"
    # A checkpoint of the unit that runs would compute them again right now.
    if not is_running and not unit.is_recomputed and unit.label != "(root)":
        yield kinds["activations"], "checkpoint it: costs its forward once more"
    if not is_running and not unit.is_resharded:
        gathered = readable_size(unit.unsharded_bytes)
        yield kinds["unsharded"], f"reshard_after_forward=True: {gathered} more to gather"
    if not is_running and unit.input_buffers > 1:
        yield kinds["communication"], "set_reduce_scatter_max_input_buffers(1): hides less"
    moving = kinds["communication"] + (kinds["unsharded"] + of_params if is_running else 0)
    yield moving // 2, "two units of half its size: twice as many collectives"
    state = kinds["params"] + min(kinds["grads"], unit.shard_bytes) + kinds["optimizer"]
    if plan.device_type != "cpu" and not plan.host_bytes:
        sent = readable_size(2 * unit.shard_bytes)
        yield state, f"CPUOffloadPolicy: {sent} more between host and device"
    yield state // 2, "twice as many shard ranks: smaller messages, more of them"
