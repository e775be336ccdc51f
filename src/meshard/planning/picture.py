"""A picture of a plan: memory over a step, stacked by kind."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from meshard.planning.memory import KINDS
from meshard.planning.report import readable_size

if TYPE_CHECKING:
    from meshard.planning.plan import Plan

try:
    from matplotlib.figure import Figure
except ImportError:  # an extra
    Figure = None  # type: ignore[assignment, misc]

# Colours that people with any kind of colour vision can tell apart: Okabe and Ito, 2008.
_COLOURS = dict(
    zip(KINDS, ("#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#009E73", "#CC79A7"), strict=True)
)


def draw_memory(plan: Plan, path: str | PathLike[str]) -> None:
    """Draw the memory over the last step of ``plan`` to an image file."""
    if Figure is None:
        raise ImportError("drawing needs matplotlib: pip install 'meshard[examples]'.")
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    numbers = list(range(len(plan.moments)))
    scale, unit = _scale_of(plan.peak_bytes)
    moments = [*plan.moments, *plan.moments[-1:]]  # each column ends where the next one begins
    heights = [[each.bytes_by_kind[kind] / scale for each in moments] for kind in KINDS]
    axes.stackplot(
        range(len(moments)),
        heights,
        labels=[_label_of(plan, kind) for kind in KINDS],
        colors=[_COLOURS[kind] for kind in KINDS],
        step="post",
    )
    for number, each in enumerate(plan.moments):
        if each.unit in ("", "(root)") and each.phase in ("forward", "backward"):
            axes.axvspan(number, number + 1, 0, 0.015, color="black", linewidth=0)
    begins = [n for n in numbers if _begins_microbatch(plan, n)]
    for count, number in enumerate(begins, 1):
        if len(begins) > 1:
            axes.axvline(number, 0, 0.85, color="black", linewidth=0.8, linestyle=":")
            axes.text(number, 1.12 * _peak_of(plan) / scale, f" microbatch {count}", fontsize=7)
    last_peak = _peak_of(plan)
    axes.axhline(last_peak / scale, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {readable_size(last_peak)}",
        (0, last_peak / scale),
        xytext=(2, 3),
        textcoords="offset points",
    )
    # The root runs between all other units, so its name would stand everywhere. It has a black bar.
    inner = [n for n in numbers if plan.moments[n].unit not in ("", "(root)")]
    shown = _spread(inner or numbers, 24)
    labels = [f"{plan.moments[n].unit or '-'} ({plan.moments[n].phase[0]})" for n in shown]
    axes.set_xticks([number + 0.5 for number in shown], labels, rotation=90, fontsize=7)
    axes.set_xlabel(
        "unit that runs, in forward (f), backward (b), optimizer (o) or after it (a); "
        "black below: the root"
    )
    axes.set_ylabel(f"memory of rank {plan.rank} of {plan.world_size} [{unit}]")
    axes.set_ylim(0, 1.35 * last_peak / scale)
    axes.margins(x=0)
    axes.legend(ncols=3, loc="upper center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _label_of(plan: Plan, kind: str) -> str:
    """Return the name of a kind, with how much of it stays over the whole step."""
    least = min((each.bytes_by_kind[kind] for each in plan.moments), default=0)
    return f"{kind} ({readable_size(least)} stays)" if least > _peak_of(plan) / 100 else kind


def _begins_microbatch(plan: Plan, number: int) -> bool:
    """Whether a forward begins there, at the beginning of the step or after a backward."""
    before = plan.moments[number - 1].phase if number else ""
    return plan.moments[number].phase == "forward" and before != "forward"


def _peak_of(plan: Plan) -> int:
    return max((each.total for each in plan.moments), default=0)


def _scale_of(num_bytes: int) -> tuple[float, str]:
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if num_bytes >= 10**power:
            return 10.0**power, unit
    return 1e3, "kB"


def _spread(numbers: list[int], count: int) -> list[int]:
    """Return at most ``count`` of the numbers, at equal distances."""
    every = max(1, -(-len(numbers) // count))
    return numbers[::every]
