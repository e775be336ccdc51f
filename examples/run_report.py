"""Progress of a run, and the report at its end."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure

TRAIN_COLOUR, HELD_OUT_COLOUR = "#4c72b0", "#c44e52"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of a run, as ``--json`` writes them."""

    held_out_loss: float  # nats per byte
    tokens_per_s: float  # of all ranks together, while training
    bytes_per_step: int  # that one rank sends in one step
    peak_bytes_per_rank: int  # of the rank that used most
    steps: int

    def write(self, path: Path) -> None:
        """Write the numbers as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(slots=True)
class History:
    """The losses of a run so far, in nats per byte, each with its step."""

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def plot(self, path: Path, title: str) -> None:
        """Draw both losses over the steps."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if self.train:
            steps, losses = zip(*self.train, strict=True)
            axes.plot(steps, losses, color=TRAIN_COLOUR, alpha=0.25, linewidth=0.8)
            axes.plot(steps, _smoothed(losses), color=TRAIN_COLOUR, label="train (moving average)")
        steps, losses = zip(*self.held_out, strict=True)
        axes.plot(steps, losses, "o--", color=HELD_OUT_COLOUR, linewidth=1, label="held out")
        axes.annotate(
            f"{losses[-1]:.2f}",
            (steps[-1], losses[-1]),
            xytext=(0, -16),
            textcoords="offset points",
            ha="center",
            color=HELD_OUT_COLOUR,
        )
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)


def _smoothed(values: tuple[float, ...], span: int = 20) -> list[float]:
    """Return the mean of each value and those up to ``span - 1`` before it."""
    windows = (values[max(0, end - span) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has used: of its GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB
