"""Progress of a run, and the report at its end."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from extras import Figure

TRAIN_COLOUR, HELD_OUT_COLOUR = "#4c72b0", "#c44e52"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of a run."""

    held_out_loss: float  # nats per byte
    tokens_per_s: float  # of all ranks together, while training
    bytes_per_step: int  # that one rank sends in one step
    peak_bytes_per_rank: int  # of the rank that used most
    steps: int


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


def write_json(path: Path, summary: Summary, history: History) -> None:
    """Write the numbers, and the losses under ``train`` and ``held_out``, as JSON."""
    path.write_text(json.dumps(asdict(summary) | asdict(history), indent=2) + "\n")


def _smoothed(values: tuple[float, ...], most: int = 20) -> list[float]:
    """Return the mean of the last values at each: of a tenth of those so far, at most ``most``."""
    ends = range(1, len(values) + 1)
    windows = (values[end - min(most, 1 + end // 10) : end] for end in ends)
    return [sum(window) / len(window) for window in windows]


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has used: of its GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB
