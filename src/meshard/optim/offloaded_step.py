"""Optimizer steps of units in host memory.

Its gradient is on its way from the device. A worker thread waits for that copy, and for no other,
and steps; the thread that runs backward waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from meshard._engine.param_group import ParamGroup
from meshard.optim.pending_step import AwaitedStep, in_step


class HostWorker:
    """One thread that takes the steps of all units, in the order of their reductions."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, group: ParamGroup, step: Callable[[], None]) -> None:
        """Take the step of a group once its gradients have arrived.

        Args:
            group: Whose. Nothing but this may touch its shards until it is over.
            step: Reads gradients, and writes shards and state.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="meshard optimizer")
        host_copies = group.tensors.host_copies
        assert host_copies is not None

        def wait_and_step() -> None:
            host_copies.wait()
            with in_step(), torch.no_grad():
                step()

        group.pending_step = HostStep(group, self._pool.submit(wait_and_step))


class HostStep(AwaitedStep):
    """A step that the worker takes.

    Args:
        group: Whose step.
        future: Its end.
    """

    def __init__(self, group: ParamGroup, future: Future[None]) -> None:
        super().__init__(group)
        self._future = future

    def _wait(self) -> None:
        self._future.result()

    def abandon(self) -> None:
        """Have it over: it has been taken."""
        self.finish()
