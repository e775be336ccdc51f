"""How are the results shown: in words, and as a picture?"""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 (the backend is chosen before)

from meshard import CommLedger


def print_summary(
    result: dict[str, Any], ledger: CommLedger, loss_before: float, sample: str
) -> None:
    """Print what was learned, what it took, and a sample."""
    print(f"\nheld-out loss      {loss_before:.3f} -> {result['held_out_loss']:.4f} nats per byte")
    print(f"speed              {result['tokens_per_s']:,.0f} tokens/s")
    print(f"peak memory        {result['peak_bytes_per_rank'] / 2**20:,.0f} MiB per rank")
    print(f"communicated       {result['bytes_per_step'] / 2**20:,.1f} MiB per step, of that")
    for op, total in ledger.bytes.items():
        print(f"  {op:<16} {total / 2**20:,.1f} MiB in {ledger.counts[op]} collectives")
    print(f"  sent by a rank   {ledger.wire_bytes / 2**20:,.1f} MiB with ring algorithms")
    print(f"\n--- sample ---\n{sample}\n--------------")


def plot_losses(
    path: Path, history: list[tuple[int, float]], held_out: list[tuple[int, float]], *, title: str
) -> None:
    """Draw training and held-out losses over steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    if history:
        steps, losses = zip(*history, strict=True)
        axes.plot(steps, losses, color="#9db7d5", linewidth=1, label="training, each step")
        smooth, value = [], losses[0]
        for loss in losses:
            value = 0.9 * value + 0.1 * loss
            smooth.append(value)
        axes.plot(steps, smooth, color="#1f4e8c", linewidth=2, label="training, smoothed")
    steps, losses = zip(*held_out, strict=True)
    axes.plot(steps, losses, "o", color="#c8501e", markersize=7, label="held out")
    axes.annotate(
        f"{losses[-1]:.3f}",
        (steps[-1], losses[-1]),
        textcoords="offset points",
        xytext=(-8, 10),
        ha="right",
        color="#c8501e",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"byte-level GPT: {title}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
