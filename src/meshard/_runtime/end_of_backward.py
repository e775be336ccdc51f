"""How do we learn that a backward has ended, or that it has failed?"""

from __future__ import annotations

import weakref
from typing import Protocol

from meshard._params.private_torch import untraced


class BackwardEvents(Protocol):
    """Who wants to know: see ``lifecycle``."""

    def finish_backward(self) -> None:
        """Autograd is done."""

    def note_failure(self) -> None:
        """A backward has raised."""


class EndOfBackward:
    """Runs at the end of a backward, or learns that there was none.

    Autograd destroys its callbacks without calling them when a backward raises.
    """

    def __init__(self, lifecycle: BackwardEvents) -> None:
        self._lifecycle = weakref.ref(lifecycle)
        self._was_called = False

    @untraced
    def __call__(self) -> None:
        """Finish the backward."""
        self._was_called = True
        lifecycle = self._lifecycle()
        if lifecycle is None:
            return
        try:
            lifecycle.finish_backward()
        except BaseException:
            lifecycle.note_failure()  # or all that follows would be taken for a recomputation
            raise

    def __del__(self) -> None:
        lifecycle = self._lifecycle()
        if lifecycle is not None and not self._was_called:
            lifecycle.note_failure()
