"""How is a unit stepped whose shards live in host memory, while backward goes on?

Its gradient is on its way from the device. A worker thread waits for that copy, and for no other,
and steps; the thread that runs backward waits for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from meshard._runtime.param_group import ParamGroup
from meshard.shown_shards import hide_shards, in_step, show_shards


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
        link = group.tensors.link
        assert link is not None

        def wait_and_step() -> None:
            link.wait()
            with in_step(), torch.no_grad():
                step()

        group.stepping = HostStep(group, self._pool.submit(wait_and_step))


class HostStep:
    """A step that the worker takes: see ``StepUnderWay``. The host waits for it.

    Args:
        group: Whose step.
        future: Its end.
    """

    def __init__(self, group: ParamGroup, future: Future[None]) -> None:
        self._group = weakref.ref(group)
        self._future = future
        hide_shards(group)

    def before_gather(self) -> None:
        """Have it over."""
        self.finish()

    def finish(self) -> None:
        """Have it over: a shard is about to be read. Raises what the optimizer has raised."""
        group = self._group()
        if group is not None:
            show_shards(group)
            group.stepping = None
        self._future.result()

    def abandon(self) -> None:
        """Have it over: it has been taken."""
        self.finish()
