"""Optimizer steps that are not visible yet."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator

from meshard._comm.communicator import CommStream, RecordedWork
from meshard._engine.param_group import ParamGroup
from meshard._torch.dtensor import hide_locals, show_locals


def hide_shards(group: ParamGroup) -> None:
    """Have the step of ``group`` that is under way finished before a shard is read."""
    # By a weak reference: what a parameter refers to must not refer to parameters.
    finish = functools.partial(finish_step, weakref.ref(group))
    hide_locals((param.sharded for param in group.params), finish)


def show_shards(group: ParamGroup) -> None:
    """Undo ``hide_shards``, finishing nothing."""
    show_locals(param.sharded for param in group.params)


def finish_step(ref: weakref.ref[ParamGroup]) -> bool:
    """Order what the caller does next after the step of a group, if one is under way.

    Returns:
        False: The caller is the step itself.
    """
    if getattr(_thread, "is_stepping", False):
        return False
    group = ref()
    if group is not None and group.pending_step is not None:
        group.pending_step.finish()
    return True


_thread = threading.local()


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Read shards inside that are hidden from all other threads."""
    _thread.is_stepping = True
    try:
        yield
    finally:
        _thread.is_stepping = False


class AwaitedStep:
    """A step under way that the host waits for: see ``PendingStep``.

    Its shards are hidden until somebody asks for one, or the unit is about to be gathered.

    Args:
        group: Whose step.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)
        hide_shards(group)

    def _wait(self) -> None:
        """Block until it is over. Raises what the optimizer has raised."""
        raise NotImplementedError

    def before_gather(self) -> None:
        """Have it over: what follows reads the shards."""
        self.finish()

    def finish(self) -> None:
        """Have it over: a shard is about to be read."""
        group = self._group()
        if group is not None:
            show_shards(group)
            group.pending_step = None
        self._wait()

    def abandon(self) -> None:
        """Do nothing: it has been taken."""


class QueuedStep:
    """A step that is queued on a device: see ``PendingStep``.

    Args:
        group: Whose step.
        pending: The event that follows it.
    """

    def __init__(self, group: ParamGroup, pending: RecordedWork) -> None:
        self._group = weakref.ref(group)
        self._pending = pending
        hide_shards(group)

    def before_gather(self) -> None:
        """Order the next use of the gather lane after it, and show the shards."""
        group = self._group()
        if group is not None:
            show_shards(group)
            group.comm.enter_after(CommStream.GATHER, self._pending)

    def finish(self) -> None:
        """Order what the caller does next after it: a shard is about to be read."""
        group = self._group()
        if group is not None:
            show_shards(group)
        self._pending.wait()

    def abandon(self) -> None:
        """Do nothing: it has been taken."""
