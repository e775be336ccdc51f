"""Share of the communication that runs beside compute.

    python tests/benchmarks/overlap.py [--json]

Eight blocks of 20 ms of compute, forward and backward, on two gloo ranks; each all-gather, or each
reduction, is made to take 20 ms longer. What is hidden is the share of these delays that does not
make the step longer. torch's fully_shard is delayed by custom collectives that return such a work,
or wait for it where it asks for no work. A run in which gradients differ is void.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import CommLedger
from meshard._comm.cpu import WorkCommunicator
from meshard._torch.private import all_gather_single, reduce_scatter_single
from tests.benchmarks.rounds import on_ranks
from tests.comm.delays import (
    BLOCKS,
    DELAY,
    Block,
    DelayedCommunicator,
    DelayedReductions,
    build,
    step_times,
)
from tests.support.parity import assert_same, full_grads


class _LateWork:
    """A work that is over no sooner than ``DELAY`` after its start."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.ready = time.monotonic() + DELAY

    def wait(self) -> None:
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.work.wait()


class _Late:
    """A collective for torch's fully_shard."""

    num_calls = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def after(self, work: dist.Work, async_op: bool) -> _LateWork | None:
        self.num_calls += 1
        late = _LateWork(work)
        if async_op:
            return late
        late.wait()
        return None


class LateGather(_Late):
    """An all-gather of 20 ms more."""

    def __call__(self, *, group: dist.ProcessGroup, async_op: bool = False, **of: Any) -> Any:
        output, source = of["output_tensor"], of["input_tensor"]
        work = all_gather_single(output, source, group=group, async_op=True)
        return self.after(work, async_op)


class LateScatter(_Late):
    """A reduce-scatter of 20 ms more."""

    def __call__(self, *, group: dist.ProcessGroup, async_op: bool = False, **of: Any) -> Any:
        output, source, op = of["output_tensor"], of["input_tensor"], of["op"]
        work = reduce_scatter_single(output, source, op, group=group, async_op=True)
        return self.after(work, async_op)


LATE = {"all_gather": LateGather, "reduce_scatter": LateScatter}
DELAYED = {"all_gather": DelayedCommunicator, "reduce_scatter": DelayedReductions}


def measure(op: str) -> dict[str, float]:
    """Delay the collectives of one kind.

    **Collective:** all ranks.
    """
    plain, delayed = step_times(DELAYED[op], (2,))
    model = build(WorkCommunicator, init_device_mesh("cpu", (2,)))
    for _ in range(2):
        with CommLedger(model) as ledger:
            model(torch.ones(2, 8)).sum().backward()
    injected = ledger.counts[op] * DELAY
    return {"step": plain, "delayed": delayed, "hidden": 1 - (delayed - plain) / injected}


def build_peer(op: str | None) -> tuple[nn.Module, _Late | None]:
    """Return the same model by torch's fully_shard, with the collectives ``op`` delayed."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(BLOCKS)])
    for module in (*model[1:], model):
        torch_fully_shard(module, mesh=mesh)
    if op is None:
        return model, None
    late = LATE[op]()
    for module in (*model[1:], model):
        setter = {
            "all_gather": "set_custom_all_gather",
            "reduce_scatter": "set_custom_reduce_scatter",
        }
        getattr(module, setter[op])(late)
    return model, late


def measure_peer(op: str) -> dict[str, float]:
    """Likewise torch's fully_shard.

    **Collective:** all ranks.
    """
    (plain, _), (delayed, late) = build_peer(None), build_peer(op)
    x = torch.ones(2, 8) * (1 + dist.get_rank())
    assert late is not None
    times: dict[nn.Module, list[float]] = {plain: [], delayed: []}
    for round_number in range(6):
        late.num_calls = 0
        for model, record in times.items():
            dist.barrier()
            start = time.monotonic()
            model(x).sum().backward()
            if round_number:
                record.append(time.monotonic() - start)
    assert_same(full_grads(delayed), full_grads(plain), bitwise=True)
    step, slow = (statistics.median(record) for record in times.values())
    hidden = 1 - (slow - step) / (late.num_calls * DELAY)
    return {"step": step, "delayed": slow, "hidden": hidden}


def run() -> dict[str, Any]:
    """Measure both kinds; return the figures."""
    figures = {op: on_ranks(measure, op, 2) for op in DELAYED}
    figures |= {f"fully_shard, {op}": on_ranks(measure_peer, op, 2) for op in DELAYED}
    print(
        f"{'collectives delayed by 20 ms':<30}{'ms':>8}{'delayed':>10}{'hidden':>9}",
        file=sys.stderr,
    )
    for op, each in figures.items():
        times = f"{1e3 * each['step']:>8.0f}{1e3 * each['delayed']:>10.0f}"
        print(f"  {op:<28}{times}{each['hidden']:>9.0%}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run()
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
