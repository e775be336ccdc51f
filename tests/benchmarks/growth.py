"""Growth with the model: CPU time of what is done once per module, unit or parameter.

Each case runs at two sizes, on a fake process group, without the garbage collector. A figure is the
smallest of a few rounds, in ms. The exponent is 1 where ten times the model takes ten times as
long; * marks one over 1.1. The ratio is that to torch's ``fully_shard`` at the larger size, in
turns, where torch has the same.
"""

import gc
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from meshard import describe, fully_shard, local_optimizer, overlap_optimizer, replicate
from tests.benchmarks.rounds import show
from tests.support.models import Made
from tests.support.ranks import fake_group

LINEAR = 1.1


def layers_of(count):
    return [nn.Linear(8, 8, bias=False) for _ in range(count)]


def model_of(count):
    return nn.Sequential(*layers_of(count))


def in_units(shard, model):
    """Make all children of a model, and itself, units."""
    for module in (*model.children(), model):
        shard(module)
    return model


def step_of(model, x=None):
    """Return a forward and backward, after two that make what later ones keep."""
    x = torch.ones(1, 8) if x is None else x

    def step():
        model.zero_grad()
        model(x).sum().backward()

    step()
    step()
    return step


def backward_of(model):
    step_of(model)
    loss = model(torch.ones(1, 8)).sum()
    return lambda: (loss.backward(), model)  # whose hooks do nothing once it is gone


def after_a_backward(model):
    model(torch.ones(1, 8)).sum().backward()
    return model


def step_of_a_unit_of_many_modules(shard, count):
    layers = layers_of(count)
    shard(layers)
    return step_of(shard(nn.Sequential(*layers)))  # torch needs one root


def shard_a_root(shard, count):
    model = model_of(count)
    for layer in model:
        shard(layer)
    return lambda: shard(model)


def step_in_which_few_train(shard, count):
    model = model_of(count)
    model[: count * 9 // 10].requires_grad_(False)
    return step_of(in_units(shard, model), torch.ones(1, 8, requires_grad=True))


def step_that_appends_to_a_list(shard, count):
    def append(layer, x, found):
        found.append(layer.inner(x))
        return found[-1]

    def pass_on(model, x):
        found = []
        for layer in model.children():
            x = layer(x, found)
        return x

    layers = {str(i): Made(append, inner=each) for i, each in enumerate(layers_of(count))}
    return step_of(in_units(shard, Made(pass_on, **layers)))


class Nested(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), Nested(depth - 1) if depth else None

    def forward(self, x):
        x = self.layer(x)
        return x if self.inner is None else self.inner(x)


def backward_of_units_in_one_another(shard, depth):
    model = Nested(depth)
    for unit in reversed([each for each in model.modules() if isinstance(each, Nested)]):
        shard(unit)
    return backward_of(model)


def unsharded_by_hand(shard, count):
    model = after_a_backward(shard(model_of(count)))
    model.unshard()
    return model.zero_grad


def overlap_each(shard, count):
    model = in_units(shard, model_of(count))
    return lambda: [overlap_optimizer(layer, torch.optim.SGD, lr=0.0) for layer in model]


class Case(NamedTuple):
    """A function that builds a model of a size and returns what is timed."""

    build: Callable[[Any, int], Callable[[], object]]
    has_peer: bool = True  # torch has the same
    sizes: tuple[int, int] = (100, 1000)


def ours(build):
    return Case(build, has_peer=False)


CASES = {
    "shard a unit of many modules": Case(lambda shard, count: partial(shard, layers_of(count))),
    "step a unit of many modules": Case(step_of_a_unit_of_many_modules),
    "shard many units": Case(lambda shard, count: partial(in_units, shard, model_of(count))),
    "shard a root around many units": Case(shard_a_root),
    "step many units": Case(lambda shard, count: step_of(in_units(shard, model_of(count)))),
    "step many units, 9 of 10 train nothing": Case(step_in_which_few_train),
    # torch grows by the square: a minute
    "step units that append to a list": ours(step_that_appends_to_a_list),
    # 2 ** 6 where each visits all inside
    "backward of units in one another": Case(backward_of_units_in_one_another, sizes=(6, 12)),
    "backward of many buckets of replicate": ours(
        lambda shard, count: backward_of(
            replicate(model_of(count), shard.keywords["mesh"], bucket_cap_mb=1e-4)
        )
    ),
    "zero_grad after unshard()": Case(unsharded_by_hand),
    "first step of local_optimizer": ours(
        lambda shard, count: (
            local_optimizer(
                after_a_backward(shard(model_of(count))), torch.optim.AdamW, lr=0.0
            ).step
        )
    ),
    "describe": ours(lambda shard, count: partial(describe, in_units(shard, model_of(count)))),
    "an overlapped optimizer per unit": ours(overlap_each),
}


def seconds_of(case, shard, mesh, size):
    """Return the CPU seconds of one call of what a case builds."""
    run = case.build(partial(shard, mesh=mesh), size)
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        _kept = run()
        return time.process_time() - start
    finally:
        gc.enable()


def cells_of(case, mesh):
    """Measure a case at both sizes, and beside torch."""
    small, large = case.sizes
    first = min(seconds_of(case, fully_shard, mesh, small) for _ in range(4))
    own, peer = [], []
    for _ in range(2):
        own.append(seconds_of(case, fully_shard, mesh, large))
        if case.has_peer:
            peer.append(seconds_of(case, torch_fully_shard, mesh, large))
    exponent = math.log(min(own) / first) / math.log(large / small)
    beside = [f"{1e3 * min(peer):.1f}", f"{min(own) / min(peer):.2f}"] if case.has_peer else []
    times = [f"{1e3 * each:.1f}" for each in (first, min(own))]
    return [f"{small}, {large}", *times, f"{exponent:.2f}" + " *"[exponent > LINEAR], *beside]


def run(only="", world=8):
    torch.set_num_threads(1)
    sys.setrecursionlimit(20_000)
    with fake_group(world):
        mesh = init_device_mesh("cpu", (world,))
        rows = {name: cells_of(case, mesh) for name, case in CASES.items() if only in name}
        gc.collect()
    show("ms of CPU time", ("sizes", "small", "large", "exponent", "torch", "/ torch"), rows)
