"""Where two runs of a script differ first, and what each took."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from meshard._compare.record import KINDS, NUM_SUMS, Fingerprint, Record, Step, has_device

Run = Sequence[Record]
Row = dict[str, Any]  # a tensor or a loss that differs at a step on a rank, as JSON has it

# Differences are relative to the norm of a tensor, or to this part of the norm of all, if that is
# more: gradients that are zero but for rounding (as of biases of keys) are all rounding.
_FLOOR = 1e-3
_NUM_ROWS = 8
_SHORT = (torch.bfloat16, torch.float16)


# --- what differs --------------------------------------------------------------------------


def _distance(one: Fingerprint | None, other: Fingerprint | None) -> float:
    """Return about the norm of the difference; None counts as zeros."""
    return math.dist(*(each.sums if each else (0.0,) * NUM_SUMS for each in (one, other)))


def _norm(tensors: Iterable[Fingerprint | None]) -> float:
    return math.hypot(*(each.norm for each in tensors if each))


def _row(one: Fingerprint | None, other: Fingerprint | None, floor: float) -> Row:
    scale = max(floor, _norm([one]), _norm([other])) or 1.0
    relative, note = _distance(one, other) / scale, ""
    if one and other and (one.dtype, one.numel) != (other.dtype, other.numel):
        note = f"({one.numel} of {one.dtype}, {other.numel} of {other.dtype})"
    return {
        "torch": one and one.norm,
        "meshard": other and other.norm,
        "relative": relative if math.isfinite(relative) else math.inf,  # of nan too
        "note": note,
    }


def differences(torchs: Run, ours: Run) -> list[Row]:
    """Return what differs, by step and kind; the largest come first. What a run lacks is None."""
    rows = []
    for records in zip(torchs, ours, strict=True):
        pairs = zip_longest(*(each.steps for each in records), fillvalue=Step([], {}))
        for number, steps in enumerate(pairs, 1):
            for kind in KINDS:
                pair = [step.tensors.get(kind, []) for step in steps]
                names = max((step.names for step in steps), key=len)
                floor = _FLOOR * _norm(pair[0])
                for index, (one, other) in enumerate(zip_longest(*pair)):
                    if one != other:
                        unit, name = names[index] if kind != "loss" else ("", "")
                        place = {"step": number, "kind": kind, "unit": unit, "parameter": name}
                        rows.append(place | {"rank": records[0].rank} | _row(one, other, floor))
    return sorted(rows, key=lambda row: (row["step"], KINDS.index(row["kind"]), -row["relative"]))


def _first_of(found: Sequence[Row]) -> list[Row]:
    """Return those of the first step and kind that differ, each on the rank where it is largest."""
    first: dict[str, Row] = {}
    for row in found:
        if all(row[key] == found[0][key] for key in ("step", "kind")):
            first.setdefault(row["parameter"], row)
    return list(first.values())


def _reasons(worst: Row, ours: Run, is_repeatable: bool) -> list[str]:
    """Return what may explain the first and largest difference. The page on compare says how."""
    is_gradient, pair = worst["kind"] == "gradient", (worst["torch"], worst["meshard"])
    factor = pair[1] / pair[0] if is_gradient and all(pair) else 1.0
    is_explained = abs(factor - 1) / max(factor, 1) > max(0.05, 0.7 * worst["relative"])
    applies = {
        "the script gives other numbers in each run": not is_repeatable,
        "initial weights": worst["kind"] == KINDS[0],
        "reduce_dtype of 16 bits": any(reduce in _SHORT for _, reduce in ours[0].dtypes),
        "reduce_dtype=None": any(param and not reduce for param, reduce in ours[0].dtypes),
        f"divide factor, by {factor:.4g}": is_explained,
        "zero_grad between microbatches": is_gradient and None in pair,
        "param.grad_dtype": is_gradient and bool(worst["note"]),
        "order of summation": len(ours) > 2 and worst["relative"] < 1e-4,
    }
    return [reason for reason, is_possible in applies.items() if is_possible]


# --- the report ----------------------------------------------------------------------------


def _measures(run: Run) -> dict[str, Any]:
    """Return the median time of a step, without the first one, and the peak, of the worst rank."""
    seconds = [[step.seconds for step in each.steps[1:]] or [math.nan] for each in run]
    losses = [loss.norm for each in run for loss in each.steps[-1].tensors["loss"] if loss]
    return {
        "units": run[0].num_units,
        "steps": len(run[0].steps),
        "mean loss of last step": statistics.fmean(losses or [math.nan]),
        "seconds per step": max(map(statistics.median, seconds)),
        f"peak {'allocated' if has_device() else 'resident'} MiB": (
            max(each.peak_bytes for each in run) / 2**20
        ),
    }


def _gradient_distance(judge: Run, tried: Run, step: int) -> float:
    """Return the distance of all gradients of a step, relative to the norm of the first ones."""
    first, second = (
        [tensor for each in run for tensor in each.steps[step].tensors["gradient"]]
        for run in (judge, tried)
    )
    return math.hypot(*map(_distance, first, second)) / (_norm(first) or 1.0)


def summarize(runs: Mapping[str, Run], rtol: float) -> dict[str, Any]:
    """Return all that is reported, as ``--json`` prints it."""
    found = differences(runs["torch"], runs["meshard"])
    summary: dict[str, Any] = {
        "ranks": len(runs["torch"]),
        "torch": _measures(runs["torch"]),
        "meshard": _measures(runs["meshard"]),
        "equal": not found,
        "first differences": _first_of(found),
        "largest difference": max((row["relative"] for row in found), default=0.0),
        "rtol": rtol,
    }
    if again := runs.get("torch again"):
        is_repeatable = not differences(runs["torch"], again)
        summary["possible reasons"] = _reasons(found[0], runs["meshard"], is_repeatable)
    if judge := runs.get("float64"):
        for library in ("torch", "meshard"):
            for name, step in (("first", 0), ("last", -1)):
                far = _gradient_distance(judge, runs[library], step)
                summary[library][f"off float64, {name} step"] = far
    return summary


def lines_of(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report on the screen."""
    yield f"{summary['ranks']} ranks".ljust(26) + f"{'torch':>14}{'meshard':>14}"
    for name in summary["torch"]:
        values = (f"{summary[each][name]:>14.6g}" for each in ("torch", "meshard"))
        yield f"{name:<26}{''.join(values)}"
    if summary["equal"]:
        yield "Equal to the last bit: losses, gradients and weights of all steps on all ranks."
        return
    first = summary["first differences"]
    yield f"First difference: {first[0]['kind']} of step {first[0]['step']}."
    for row in first[:_NUM_ROWS]:
        what = f"{row['parameter']} in unit {row['unit']}: norm " if row["unit"] else ""
        norms = ", ".join(
            f"{'nothing' if row[each] is None else format(row[each], '.7g')} with {each}"
            for each in ("torch", "meshard")
        )
        far = f"relative {row['relative']:.1e} on rank {row['rank']}"
        yield f"  {what}{norms}, {far} {row['note']}".rstrip()
    if len(first) > _NUM_ROWS:
        yield f"  and {len(first) - _NUM_ROWS} others"
    is_in = "within" if summary["largest difference"] <= summary["rtol"] else "beyond"
    yield f"Largest of all steps: {summary['largest difference']:.1e}, {is_in} --rtol."
    reasons = ", ".join(summary["possible reasons"]) or "none is documented; please report it"
    yield f"Possible reasons: {reasons}."
