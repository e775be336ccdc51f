"""What is a unit to do with the step of an optimizer that may not be over?"""

from __future__ import annotations

from typing import Protocol


class StepUnderWay(Protocol):
    """The step of a group that an optimizer has begun; until its next gather is there."""

    def before_gather(self) -> None:
        """Order the next use of the gather lane after it, and show the shards."""

    def finish(self) -> None:
        """Order what the caller does next after it."""

    def abandon(self) -> None:
        """The window is void: do not take the step, if it has not been taken."""
