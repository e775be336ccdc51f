"""Owners on a device: the same numbers as one process, no waits of the host, and time."""

from functools import partial

import torch
import torch.distributed as dist

import meshard
from tests.benchmarks import owner_step
from tests.benchmarks.pretend_network import NOTHING, pretend_group
from tests.benchmarks.rounds import in_turns, medians
from tests.cuda.device import on_ranks
from tests.cuda.times import kernels_of
from tests.support.cases import CASES
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.sharding import shard_blocks

MUON = partial(torch.optim.Muon, lr=0.02)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def make(device, shape=()):
    model = shard_blocks(seeded(MlpStack()), device.mesh(*shape))
    matrices = meshard.owner_optimizer(
        model, torch.optim.Muon, lr=0.02, select=lambda _, param: param.dim() == 2
    )
    vectors = ADAMW([param for param in model.parameters() if param.dim() != 2])
    return model, (matrices, vectors)


def backward(model, device, step):
    x = CASES["mlp_stack"].batch(step, dist.get_rank()).to(device.kind)
    model(x).square().mean().backward()


def as_one_process(device, shape=()):
    """Compare steps on gathered gradients with those of ordinary optimizers."""
    model, ours = make(device, shape)
    plain = {name: torch.nn.Parameter(each) for name, each in full_state(model).items()}
    optimizers = [
        MUON([param for param in plain.values() if param.dim() == 2]),
        ADAMW([param for param in plain.values() if param.dim() != 2]),
    ]
    for step in range(5):
        backward(model, device, step)
        grads = full_grads(model)
        for name, param in plain.items():
            param.grad = grads[name]
        for optimizer in (*ours, *optimizers):
            optimizer.step()
        model.zero_grad()
        found = full_state(model)
        expected = {name: param.detach() for name, param in plain.items()}
        assert_same(found, expected, bitwise=True)


def without_host_waits(device):
    """In later steps the host waits for nothing."""
    model, ours = make(device)

    def step(number):
        backward(model, device, number)
        for each in ours:
            each.step()
            each.zero_grad()

    for number in range(3):
        step(number)
    x = CASES["mlp_stack"].batch(0, 0).to(device.kind)
    with device.refused_waits():
        model(x).square().mean().backward()
        for each in ours:
            each.step()


def times(device, ranks=8):
    """Time a step of Muon on pretended ranks, where nothing is sent."""
    device.communicate()
    shapes = (
        [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] if device.is_real else [(8, 8)]
    )
    draw = partial(torch.randn, device=device.kind)
    with pretend_group(ranks, NOTHING):
        model = owner_step.make(meshard.fully_shard, device.mesh(), shapes, 8, 0)
        ours = meshard.owner_optimizer(
            model, torch.optim.Muon, lr=0.02, select=lambda _, param: param.dim() == 2
        )
        whole = MUON([torch.nn.Parameter(draw(each)) for each in shapes * 8])
        mine = [name for name, owner in ours.owners.items() if owner == 0]
        share = MUON([torch.nn.Parameter(draw(model.get_parameter(each).shape)) for each in mine])
        for optimizer in (whole, share):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = draw(param.shape)
        steps = {"whole": whole.step, "share": share.step, "owners": ours.step}
        how = {"rounds": 9 if device.is_real else 2, "warm_up": 3}
        timed = {name: partial(device.seconds, step) for name, step in steps.items()}
        found = medians(in_turns(timed, **how)[1], 1e3)
        busy = sum(each["dur"] for each in kernels_of(ours.step)) if device.is_real else 0.0
    return (
        f"owner_optimizer {found['owners'] / found['whole']:.2f} of Muon on all matrices "
        f"({found['whole']:.1f} ms), its share alone {found['share'] / found['whole']:.2f}; "
        f"kernels run for {busy / 1e3:.1f} ms"
    )


def checks(device):
    def on_one(function):
        with device.group_of_one():
            function(device)

    return {
        "one rank": lambda: on_one(as_one_process),
        "2 ranks": lambda: on_ranks(device, as_one_process, 2) and None,
        "2 x 2 ranks": lambda: on_ranks(device, as_one_process, 4, (2, 2)) and None,
        "no waits of the host": lambda: on_one(without_host_waits),
        "time of a step, 8 ranks": lambda: times(device),
    }
