"""Through which files does a call go: the last gradient of a unit, and fully_shard of a unit?

    python tests/benchmarks/walks.py

Counts the files of the library, the calls, and how often the walk goes from one file to another.
The walk of a gradient begins at the hook of the unit's last one and ends when ``.grad`` is set. The
two ranks are threads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import meshard
from tests.support.threads import run_threads

HOME = Path(meshard.__file__).parent


class Walk(NamedTuple):
    """What a call went through."""

    files: list[str]  # in the order of their first call
    num_calls: int
    num_changes: int  # from one file to another


class Tracer:
    """Records the library's functions that are called while it is installed."""

    def __init__(self, until: str = "") -> None:
        self._until = until  # the function whose return ends the walk
        self._calls: list[str] = []

    def __enter__(self) -> Tracer:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if HOME not in path.parents:
            return
        if event == "call":
            self._calls.append(str(path.relative_to(HOME)))
        elif event == "return" and frame.f_code.co_name == self._until:
            sys.setprofile(None)

    @property
    def walk(self) -> Walk:
        changes = sum(a != b for a, b in zip(self._calls, self._calls[1:], strict=False))
        return Walk(list(dict.fromkeys(self._calls)), len(self._calls), changes)


def _walk_of_fully_shard() -> Walk:
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(8, 8)
    with Tracer() as tracer:
        meshard.fully_shard(model, mesh)
    return tracer.walk


def _walk_of_last_gradient() -> Walk:
    mesh, found = init_device_mesh("cpu", (2,)), list[Walk]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    for module in (model[0], model):
        meshard.fully_shard(module, mesh)
    unit = vars(model[0])["_meshard_unit"]

    def step(trace: bool) -> None:
        loss = model(torch.ones(2, 8)).sum()
        if not trace:
            loss.backward()
            return
        tracer, arrived = Tracer(until="publish"), list[int]()

        def begin(_: Any) -> None:
            arrived.append(1)
            if len(arrived) == len(unit.params):
                tracer.__enter__()

        hooks = [param.unsharded.register_hook(begin) for param in unit.params]
        loss.backward()
        tracer.__exit__()
        for hook in hooks:
            hook.remove()
        found.append(tracer.walk)

    for trace in (False, False, True):
        step(trace)
        model.zero_grad()
    return found[0]


def run() -> dict[str, Walk]:
    ways = {
        "fully_shard of a unit": _walk_of_fully_shard,
        "last gradient to .grad": _walk_of_last_gradient,
    }
    return {name: run_threads(way, 2)[0] for name, way in ways.items()}


def main() -> None:
    for name, walk in run().items():
        print(
            f"{name}: {len(walk.files)} files, {walk.num_calls} calls, {walk.num_changes} changes"
        )
        print("  " + ", ".join(walk.files))


if __name__ == "__main__":
    main()
