"""Share of the communication that runs beside compute.

Eight blocks of 20 ms of compute, forward and backward, on two gloo ranks; each all-gather, or each
reduction, is made to take 20 ms longer. What is hidden is the share of these delays that does not
make the step longer. torch's fully_shard is delayed by custom collectives that return such a work,
or wait for it where it asks for no work. A run in which gradients differ is void.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from meshard import CommLedger
from meshard._comm.cpu import WorkCommunicator
from meshard._torch.private import all_gather_single, reduce_scatter_single
from tests.benchmarks.rounds import in_turns, medians, on_ranks, show
from tests.comm.delays import (
    BLOCKS,
    DELAY,
    Block,
    DelayedCommunicator,
    DelayedReductions,
    Late,
    build,
    step_times,
)
from tests.support.parity import assert_same, full_grads

DELAYED = {"all_gather": DelayedCommunicator, "reduce_scatter": DelayedReductions}


def measure(op):
    """Delay the collectives of one kind. All ranks call it."""
    plain, delayed = step_times(DELAYED[op], (2,))
    model = build(WorkCommunicator, init_device_mesh("cpu", (2,)))
    for _ in range(2):
        with CommLedger(model) as ledger:
            model(torch.ones(2, 8)).sum().backward()
    return figures_of(plain, delayed, ledger.counts[op])


def figures_of(plain, delayed, num_delays):
    hidden = 1 - (delayed - plain) / (num_delays * DELAY)
    return {"step": plain, "delayed": delayed, "hidden": hidden}


class LateForThePeer:
    """A collective for torch's fully_shard that takes ``DELAY`` longer."""

    def __init__(self, op):
        self.op, self.num_calls = op, 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor, input_tensor, group, op=None, async_op=False):
        self.num_calls += 1
        if self.op == "all_gather":
            call = all_gather_single
        else:
            call = partial(reduce_scatter_single, op=op)
        work = call(output_tensor, input_tensor, group=group, async_op=True)
        late = Late(work)
        return late if async_op else late.wait()


def measure_peer(op):
    """Delay those of torch's fully_shard. All ranks call it."""
    mesh, late, models = init_device_mesh("cpu", (2,)), LateForThePeer(op), {}
    for name in ("plain", "delayed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(BLOCKS)])
        for module in (*model[1:], model):
            torch_fully_shard(module, mesh=mesh)
            if name == "delayed":
                getattr(module, f"set_custom_{op}")(late)
        models[name] = model
    x, rounds = torch.ones(2, 8) * (1 + dist.get_rank()), 5
    steps = {name: lambda m=model: m(x).sum().backward() for name, model in models.items()}
    seconds, _ = in_turns(steps, rounds=rounds, warm_up=1, before=dist.barrier)
    assert_same(*(full_grads(model) for model in models.values()), bitwise=True)
    return figures_of(**medians(seconds), num_delays=late.num_calls / (rounds + 1))


def run():
    figures = {op: on_ranks(measure, op, 2) for op in DELAYED}
    figures |= {f"fully_shard, {op}": on_ranks(measure_peer, op, 2) for op in DELAYED}
    rows = {
        op: (f"{1e3 * each['step']:.0f}", f"{1e3 * each['delayed']:.0f}", f"{each['hidden']:.0%}")
        for op, each in figures.items()
    }
    show("collectives delayed by 20 ms", ("ms", "delayed", "hidden"), rows)
