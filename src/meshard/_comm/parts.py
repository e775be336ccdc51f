"""Which part of a step is about to begin?"""

from __future__ import annotations

import enum


class Part(enum.Enum):
    """What a communicator may keep memory for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # of an optimizer; then all of it again
