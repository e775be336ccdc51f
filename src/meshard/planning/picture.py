"""A picture of a plan: memory over a step, stacked by kind."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from meshard.planning.report import readable_size

if TYPE_CHECKING:
    from meshard.planning.plan import Plan

# Of kinds, told apart with any kind of colour vision: Okabe and Ito, 2008.
_COLOURS = ("#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#009E73", "#CC79A7")
_MOST_LABELS = 24


def draw_memory(plan: Plan, path: str | PathLike[str]) -> None:
    """Draw the memory over the last step of ``plan`` to an image file."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    peak = max(each.total for each in plan.moments)
    columns = [*plan.moments, plan.moments[-1]]  # each ends where the next one begins
    heights = {k: [each.bytes_by_kind[k] for each in columns] for k in plan.bytes_by_kind}
    least = {kind: min(sizes) for kind, sizes in heights.items()}
    labels = [
        f"{kind} ({readable_size(size)} stays)" if size > peak / 100 else kind
        for kind, size in least.items()
    ]
    axes.stackplot(
        range(len(columns)),
        list(heights.values()),
        labels=labels,
        colors=_COLOURS,
        step="post",
    )
    begins = []  # of microbatches
    named = []
    for number, each in enumerate(plan.moments):
        if each.phase == "forward" and (not number or plan.moments[number - 1].phase != "forward"):
            begins.append(number)
        if each.phase in ("forward", "backward") and each.unit in ("", "(root)"):
            # The root runs between all other units, so its name would stand everywhere.
            axes.axvspan(number, number + 1, 0, 0.015, color="black", linewidth=0)
        else:
            named.append(number)
    for count, number in enumerate(begins if len(begins) > 1 else (), 1):
        axes.axvline(number, 0, 0.85, color="black", linewidth=0.8, linestyle=":")
        axes.text(number, 1.12 * peak, f" microbatch {count}", fontsize=7)
    axes.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axes.text(0, 1.01 * peak, f" peak of the step {readable_size(peak)}")
    shown = named[:: 1 + len(named) // _MOST_LABELS]
    moments = [plan.moments[number] for number in shown]
    labels = [f"{each.unit} ({each.phase[0]})" if each.unit else each.phase for each in moments]
    axes.set_xticks([number + 0.5 for number in shown], labels, rotation=90, fontsize=7)
    axes.set_xlabel("unit that runs, in forward (f) or backward (b); black below: the root")
    axes.set_ylabel(f"memory of rank {plan.rank} of {plan.world_size}")
    axes.yaxis.set_major_formatter(lambda num_bytes, _: readable_size(num_bytes))
    axes.set_ylim(0, 1.35 * peak)
    axes.margins(x=0)
    axes.legend(ncols=3, loc="upper center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
