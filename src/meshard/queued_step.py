"""What if the step of a unit is queued on a device, and not over yet?"""

from __future__ import annotations

import weakref

from meshard._comm.communicator import Lane, Queued
from meshard._runtime.param_group import ParamGroup
from meshard.shown_shards import hide_shards, show_shards


class QueuedStep:
    """A step that is queued on a device: see ``StepUnderWay``.

    Args:
        group: Whose step.
        pending: The event that follows it.
    """

    def __init__(self, group: ParamGroup, pending: Queued) -> None:
        self._group = weakref.ref(group)
        self._pending = pending
        hide_shards(group)

    def before_gather(self) -> None:
        """Order the next use of the gather lane after it, and show the shards."""
        group = self._group()
        if group is not None:
            show_shards(group)
            group.comm.enter_after(Lane.GATHER, self._pending)

    def finish(self) -> None:
        """Order what the caller does next after it: a shard is about to be read."""
        group = self._group()
        if group is not None:
            show_shards(group)
        self._pending.wait()

    def abandon(self) -> None:
        """Do nothing: it has been taken."""
