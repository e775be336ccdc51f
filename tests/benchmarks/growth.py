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

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from meshard import describe, flat_optimizer, fully_shard, overlap_optimizer, replicate
from tests.benchmarks.rounds import show
from tests.support.fake import fake_group

LINEAR = 1.1
# By name: a function that builds a model of a size and returns what is timed, whether torch has
# the same, and the two sizes.
CASES = {}


def case(name, *, has_peer=True, sizes=(100, 1000)):
    def register(build):
        CASES[name] = build, has_peer, sizes
        return build

    return register


def layers_of(count, kind=nn.Linear):
    return [kind(8, 8, bias=False) for _ in range(count)]


def units_of(shard, mesh, layers, root=None):
    """Return a root around the layers, one unit each and one for the root."""
    root = nn.Sequential(*layers) if root is None else root
    for module in (*layers, root):
        shard(module, mesh=mesh)
    return root


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


@case("shard a unit of many modules")
def _(shard, mesh, count):
    layers = layers_of(count)
    return lambda: shard(layers, mesh=mesh)


@case("step a unit of many modules")
def _(shard, mesh, count):
    layers = layers_of(count)
    shard(layers, mesh=mesh)
    return step_of(shard(nn.Sequential(*layers), mesh=mesh))  # torch needs one root


@case("shard many units")
def _(shard, mesh, count):
    layers = layers_of(count)
    return lambda: units_of(shard, mesh, layers)


@case("shard a root around many units")
def _(shard, mesh, count):
    layers = layers_of(count)
    for layer in layers:
        shard(layer, mesh=mesh)
    model = nn.Sequential(*layers)
    return lambda: shard(model, mesh=mesh)


@case("step many units")
def _(shard, mesh, count):
    return step_of(units_of(shard, mesh, layers_of(count)))


@case("step many units, 9 of 10 train nothing")
def _(shard, mesh, count):
    layers = layers_of(count)
    for layer in layers[: count * 9 // 10]:
        layer.requires_grad_(False)
    return step_of(units_of(shard, mesh, layers), torch.ones(1, 8, requires_grad=True))


class Appending(nn.Linear):
    def forward(self, x, found):
        found.append(super().forward(x))
        return found[-1]


class PassingOn(nn.ModuleList):
    def forward(self, x):
        found = []
        for layer in self:
            x = layer(x, found)
        return x


@case("step units that append to a list", has_peer=False)  # torch grows by the square: a minute
def _(shard, mesh, count):
    layers = layers_of(count, Appending)
    return step_of(units_of(shard, mesh, layers, PassingOn(layers)))


class Nested(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), Nested(depth - 1) if depth else None

    def forward(self, x):
        x = self.layer(x)
        return x if self.inner is None else self.inner(x)


@case("backward of units in one another", sizes=(6, 12))  # 2 ** 6 where each visits all inside
def _(shard, mesh, depth):
    model = Nested(depth)
    for unit in reversed([each for each in model.modules() if isinstance(each, Nested)]):
        shard(unit, mesh=mesh)
    return backward_of(model)


@case("backward of many buckets of replicate", has_peer=False)
def _(_, mesh, count):
    return backward_of(replicate(nn.Sequential(*layers_of(count)), mesh, bucket_cap_mb=1e-4))


@case("zero_grad after unshard()")
def _(shard, mesh, count):
    model = shard(nn.Sequential(*layers_of(count)), mesh=mesh)
    model(torch.ones(1, 8)).sum().backward()
    model.unshard()
    return model.zero_grad


@case("first step of flat_optimizer", has_peer=False)
def _(shard, mesh, count):
    model = shard(nn.Sequential(*layers_of(count)), mesh=mesh)
    model(torch.ones(1, 8)).sum().backward()
    return flat_optimizer(model, torch.optim.AdamW, lr=0.0).step


@case("describe", has_peer=False)
def _(shard, mesh, count):
    model = units_of(shard, mesh, layers_of(count))
    return lambda: describe(model)


@case("an overlapped optimizer per unit", has_peer=False)
def _(shard, mesh, count):
    model = units_of(shard, mesh, layers_of(count))
    return lambda: [overlap_optimizer(layer, torch.optim.SGD, lr=0.0) for layer in model]


def seconds_of(run):
    """Return the CPU seconds of one call."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        _kept = run()
        return time.process_time() - start
    finally:
        gc.enable()


def measure(build, has_peer, sizes, mesh):
    """Return milliseconds at both sizes and of torch, the exponent and the ratio to torch."""
    small, large = sizes
    first = min(seconds_of(build(fully_shard, mesh, small)) for _ in range(4))
    own, peer = [], []
    for _ in range(2):
        own.append(seconds_of(build(fully_shard, mesh, large)))
        if has_peer:
            peer.append(seconds_of(build(torch_fully_shard, mesh, large)))
    figures = {"small": 1e3 * first, "large": 1e3 * min(own)}
    figures["exponent"] = math.log(min(own) / first) / math.log(large / small)
    if has_peer:
        figures |= {"torch": 1e3 * min(peer), "ratio": min(own) / min(peer)}
    return figures


def run(only="", world=8):
    torch.set_num_threads(1)
    sys.setrecursionlimit(20_000)
    figures, rows = {}, {}
    with fake_group(world):
        mesh = init_device_mesh("cpu", (world,))
        for name, (build, has_peer, sizes) in CASES.items():
            if only not in name:
                continue
            each = figures[name] = measure(build, has_peer, sizes, mesh)
            cells = [str(size) for size in sizes]
            cells += [
                f"{each[key]:.1f}" if key in each else "" for key in ("small", "large", "torch")
            ]
            cells.append(f"{each['exponent']:.2f}" + " *"[each["exponent"] > LINEAR])
            rows[name] = (*cells, f"{each['ratio']:.2f}" if has_peer else "")
        gc.collect()
    show("ms of CPU time", ("size", "size", "ms", "ms", "torch", "exponent", "/ torch"), rows)
    return figures
