"""Growth with the model: CPU time of what is done once per module, unit or parameter.

    python tests/benchmarks/growth.py [--only WORD] [--json]

Each case runs at two sizes, on a fake process group, without the garbage collector. A figure is the
smallest of a few rounds. The exponent is 1 where ten times the model takes ten times as long; the
ratio is that to torch's ``fully_shard`` at the larger size, in turns, where torch has the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshard import describe, flat_optimizer, fully_shard, overlap_optimizer
from tests.support.fake import fake_group

SMALL, LARGE = 100, 1000
TARGETS = {"exponent": 1.1, "ratio": 1.3}
Shard = Callable[..., Any]
Run = Callable[[], object]
# Builds a model of a size, and returns what is measured.
Case = Callable[[Shard, DeviceMesh, int], Run]


class Appending(nn.Linear):
    """A layer that appends its output to the list it is given."""

    def forward(self, given: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        """Return what is appended."""
        found.append(super().forward(given))
        return found[-1]


class PassingOn(nn.ModuleList):
    """Layers that append to one list."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the last output."""
        found: list[torch.Tensor] = []
        for layer in self:
            given = layer(given, found)
        return given


def layers_of(count: int, kind: type[nn.Module] = nn.Linear) -> list[nn.Module]:
    """Return small layers without bias."""
    return [kind(8, 8, bias=False) for _ in range(count)]


def units_of(
    shard: Shard, mesh: DeviceMesh, layers: list[nn.Module], root: Any = nn.Sequential
) -> Any:
    """Return a root around the layers, one unit each and one for the root."""
    for layer in layers:
        shard(layer, mesh=mesh)
    model = root(*layers) if root is nn.Sequential else root(layers)
    shard(model, mesh=mesh)
    return model


def step_of(call: Callable[[], torch.Tensor], model: nn.Module) -> Run:
    """Return a forward and backward, after two that make what later ones keep."""

    def step() -> None:
        model.zero_grad()
        call().sum().backward()

    step()
    step()
    return step


def shard_list(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Shard one unit of many modules."""
    layers = layers_of(count)
    return lambda: shard(layers, mesh=mesh)


def step_list(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Step one unit of many modules."""
    layers = layers_of(count)
    shard(layers, mesh=mesh)
    model = nn.Sequential(*layers)
    shard(model, mesh=mesh)  # torch needs one root
    return step_of(lambda: model(torch.ones(1, 8)), model)


def shard_units(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Shard many units and the root."""
    layers = layers_of(count)
    return lambda: units_of(shard, mesh, layers)


def shard_root(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Shard a root around many units."""
    layers = layers_of(count)
    for layer in layers:
        shard(layer, mesh=mesh)
    model = nn.Sequential(*layers)
    return lambda: shard(model, mesh=mesh)


def step_units(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Step many units."""
    model = units_of(shard, mesh, layers_of(count))
    return step_of(lambda: model(torch.ones(1, 8)), model)


def step_frozen(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Step many units of which the first nine tenths train nothing."""
    layers = layers_of(count)
    for layer in layers[: count * 9 // 10]:
        layer.requires_grad_(False)
    model = units_of(shard, mesh, layers)
    given = torch.ones(1, 8, requires_grad=True)
    return step_of(lambda: model(given), model)


def step_appending(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Step units that pass a growing list on."""
    model = units_of(shard, mesh, layers_of(count, Appending), PassingOn)
    return step_of(lambda: model(torch.ones(1, 8)), model)


def zero_unsharded(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Call ``zero_grad`` of a unit of many parameters after ``unshard()``."""
    model = nn.Sequential(*layers_of(count))
    shard(model, mesh=mesh)
    model(torch.ones(1, 8)).sum().backward()
    model.unshard()  # type: ignore[operator]
    return model.zero_grad


def step_flat(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Step a ``flat_optimizer`` for the first time, one unit of many parameters."""
    model = nn.Sequential(*layers_of(count))
    shard(model, mesh=mesh)
    model(torch.ones(1, 8)).sum().backward()
    return flat_optimizer(model, torch.optim.AdamW, lr=0.0).step


def describe_units(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Describe many units."""
    model = units_of(shard, mesh, layers_of(count))
    return lambda: describe(model)


def overlap_units(shard: Shard, mesh: DeviceMesh, count: int) -> Run:
    """Make one overlapped optimizer per unit."""
    model = units_of(shard, mesh, layers_of(count))
    return lambda: [overlap_optimizer(layer, torch.optim.SGD, lr=0.0) for layer in model]


# Whether to time torch; with the list, that grows by the square and takes a minute.
CASES: dict[str, tuple[Case, bool]] = {
    "shard a unit of many modules": (shard_list, True),
    "step a unit of many modules": (step_list, True),
    "shard many units": (shard_units, True),
    "shard a root around many units": (shard_root, True),
    "step many units": (step_units, True),
    "step many units, 9 of 10 train nothing": (step_frozen, True),
    "step units that append to a list": (step_appending, False),
    "zero_grad after unshard()": (zero_unsharded, True),
    "first step of flat_optimizer": (step_flat, False),
    "describe": (describe_units, False),
    "an overlapped optimizer per unit": (overlap_units, False),
}


def seconds_of(case: Case, shard: Shard, mesh: DeviceMesh, count: int) -> float:
    """Return the CPU seconds of one run on a new model."""
    run = case(shard, mesh, count)
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        kept = run()
        seconds = time.process_time() - start
    finally:
        gc.enable()
    del kept
    return seconds


def measure(case: Case, mesh: DeviceMesh, *, has_peer: bool) -> dict[str, float]:
    """Return milliseconds at both sizes, the exponent and the ratio to torch."""
    small = min(seconds_of(case, fully_shard, mesh, SMALL) for _ in range(4))
    own, peer = [], []
    for _ in range(2):
        own.append(seconds_of(case, fully_shard, mesh, LARGE))
        if has_peer:
            peer.append(seconds_of(case, torch_fully_shard, mesh, LARGE))
    large = min(own)
    figures = {"small": 1e3 * small, "large": 1e3 * large}
    figures["exponent"] = math.log(large / small) / math.log(LARGE / SMALL)
    if has_peer:
        figures |= {"torch": 1e3 * min(peer), "ratio": large / min(peer)}
    return figures


def run(only: str = "", world: int = 8) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure the cases whose names have ``only`` in them, one by one."""
    torch.set_num_threads(1)
    sys.setrecursionlimit(20 * LARGE)
    with fake_group(world):
        mesh = init_device_mesh("cpu", (world,))
        for name, (case, has_peer) in CASES.items():
            if only in name:
                yield name, measure(case, mesh, has_peer=has_peer)
        gc.collect()


def line_of(name: str, figures: dict[str, float]) -> str:
    """Return a line of the table; figures beyond their target are marked."""
    cells = [f"  {name:<40}{figures['small']:>9.1f}{figures['large']:>9.1f}"]
    cells.append(f"{figures['torch']:>9.1f}" if "torch" in figures else f"{'':>9}")
    for key, target in TARGETS.items():
        over = key in figures and figures[key] > target
        cells.append(f"{figures[key]:>10.2f}{'*' if over else ' '}" if key in figures else "")
    return "".join(cells).rstrip()


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a word in the names of cases")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(dict(run(args.only))))
        return
    print(f"ms of CPU time at {SMALL} and {LARGE}; * is beyond {TARGETS}")
    print(f"  {'':<40}{SMALL:>9}{LARGE:>9}{'torch':>9}{'exponent':>10} {'/ torch':>10}")
    for name, figures in run(args.only):
        print(line_of(name, figures), flush=True)


if __name__ == "__main__":
    main()
