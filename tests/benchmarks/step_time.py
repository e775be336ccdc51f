"""Time of a training step, against others that train the same model.

    python tests/benchmarks/step_time.py [--ranks 2] [--rounds 15] [--json]

Forward, backward and AdamW of a GPT of 8 blocks, on gloo ranks of one thread each. The lower bound
is the same model without any communication. Ours runs as its pages recommend: ranks of one host
share memory, and the optimizer works on flat shards; further rows show it through sockets, and with
torch's optimizer on the DTensors. A run in which losses differ is void.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import contenders
from tests.benchmarks.contenders import (
    COMPUTE,
    DDP,
    FSDP1,
    NARROW,
    OURS,
    OURS_WHOLE,
    PEER,
    PEER_WHOLE,
    PLAIN,
    PLAIN_WHOLE,
    REPLICATED,
    REPLICATED_SENT,
    SENT,
    SENT_WHOLE,
    WIDTH_256,
    WIDTH_512,
    Configuration,
)
from tests.benchmarks.rounds import Times, interleave, on_ranks, print_figures

EVERYBODY = (
    COMPUTE,
    DDP,
    REPLICATED,
    REPLICATED_SENT,
    FSDP1,
    PEER,
    OURS,
    PLAIN,
    SENT,
    PEER_WHOLE,
    OURS_WHOLE,
    PLAIN_WHOLE,
    SENT_WHOLE,
)
# Targets: ours, against whom, and at most how much of their time.
TARGETS = (
    (OURS, PEER, 0.75),
    (PLAIN, PEER, 0.75),
    (SENT, PEER, 0.75),
    (OURS_WHOLE, PEER_WHOLE, 0.80),
    (PLAIN_WHOLE, PEER_WHOLE, 0.80),
    (SENT_WHOLE, PEER_WHOLE, 0.80),
    (OURS_WHOLE, DDP, 1.00),
    (PLAIN_WHOLE, DDP, 1.00),
    (SENT_WHOLE, DDP, 1.00),
    (REPLICATED, DDP, 1.00),
    (REPLICATED_SENT, DDP, 1.00),
)
_LOSS_TOLERANCE = 1e-4  # float32: rounding of another order of summation, over all steps
_NARROW_TOLERANCE = 2e-2


class Task(NamedTuple):
    """What the ranks are to do."""

    configuration: Configuration
    rounds: int
    warm_up: int
    everybody: tuple[str, ...] = EVERYBODY
    clock: Callable[[], float] = time.perf_counter
    device: str = "cpu"


class Result(NamedTuple):
    """What came of it."""

    times: dict[str, Times]
    losses: dict[str, float]


def measure(task: Task) -> Result:
    """Time everybody on one configuration.

    **Collective:** all ranks.

    Raises:
        RuntimeError: The losses differ, so the times are worth nothing.
    """
    configuration = task.configuration
    mesh, device = (
        init_device_mesh(task.device, (dist.get_world_size(),)),
        torch.device(task.device),
    )
    tokens, following = configuration.make_batch(dist.get_rank())
    batch = tokens.to(device), following.to(device)
    # DDP has no bfloat16 compute with float32 gradients in its public interface.
    whole = (DDP, REPLICATED, REPLICATED_SENT)
    names = [name for name in task.everybody if not (configuration.narrow and name in whole)]
    steps = {}
    for name in names:
        model = contenders.make(name, configuration, mesh, device)
        optimizer = functools.partial(contenders.make_own_optimizer, name)
        steps[name] = contenders.trainer(model, batch, optimizer)
    times, losses = interleave(steps, rounds=task.rounds, warm_up=task.warm_up, clock=task.clock)
    tolerance = _NARROW_TOLERANCE if configuration.narrow else _LOSS_TOLERANCE
    for name in names:
        if name != COMPUTE and abs(losses[name] - losses[PEER]) > tolerance * losses[PEER]:
            raise RuntimeError(f"losses differ, so no time counts: {losses}")
    return Result(times, losses)


def report(
    configuration: Configuration,
    result: Result,
    targets: tuple[tuple[str, str, float], ...] = TARGETS,
) -> str:
    """Return a table of times, and of the ratios that have a target."""
    times = result.times
    lines = [configuration.name, f"{'':<30}{'ms':>8}{'quartiles':>18}{'of compute':>12}"]
    for name, t in times.items():
        spread = f"{t.low:.0f} to {t.high:.0f}"
        lines.append(
            f"  {name:<28}{t.median:>8.0f}{spread:>18}{t.median / times[COMPUTE].median:>12.2f}"
        )
    for ours, peer, target in targets:
        if peer in times and ours in times:
            ratio = times[ours].median / times[peer].median
            lines.append(f"  {f'{ours} / {peer}':<56}{ratio:>6.2f}   target {target:.2f}")
    return "\n".join(lines)


def run(ranks: int = 2, rounds: int = 15, warm_up: int = 3) -> dict[str, Any]:
    """Measure all configurations; return the figures."""
    figures: dict[str, Any] = {}
    for configuration in (WIDTH_256, WIDTH_512, NARROW):
        result = on_ranks(measure, Task(configuration, rounds, warm_up), ranks)
        print(report(configuration, result), file=sys.stderr, flush=True)
        figures[configuration.name] = {
            "milliseconds": {name: t.as_dict() for name, t in result.times.items()},
            "losses": result.losses,
        }
    return figures


if __name__ == "__main__":
    print_figures(run, __doc__, rounds=15, warm_up=3)
