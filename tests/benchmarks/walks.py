"""Through which files does a call go: the last gradient of a unit, and fully_shard of a unit?

    python tests/benchmarks/walks.py

Counts the files of the library, the calls, and how often the walk goes from one file to another. On
two threads as ranks, so that the reduction runs to its end inside the walk.
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

    def __init__(self) -> None:
        self._calls: list[str] = []

    def __enter__(self) -> Tracer:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and HOME in path.parents:
            self._calls.append(str(path.relative_to(HOME)))

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
    """From the hook of the last gradient to the end of the backward, when ``.grad`` is set."""
    model = nn.Linear(8, 8)
    meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
    unit, found = vars(model)["_meshard_unit"], list[Walk]()

    def step(trace: bool) -> None:
        loss = model(torch.ones(2, 8)).sum()
        if not trace:
            loss.backward()
            return
        tracer, arrived = Tracer(), []

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
