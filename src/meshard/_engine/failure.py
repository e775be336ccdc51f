"""What is known of a step that was cut off."""

from __future__ import annotations

from meshard._torch.private import BackwardCall


class Failure:
    """Whether something was cut off, in one root: then the next use begins with cleaning up.

    Where no exception handler is sure to run (in autograd, and while cleaning up) a mark is set
    before the act and cleared after it.
    """

    def __init__(self) -> None:
        self.marks: list[object] = []  # not empty: clean up before the next use
        self.backward_call: BackwardCall | None = None  # that of the backward that runs
        self.interrupt: BaseException | None = None  # what Python ignored, and is still to raise

    def has_backward_returned(self) -> bool:
        """Whether the backward that runs has raised, and autograd did not drop its callback yet.

        The thread of a device may do that after the exception has reached the user.
        """
        return self.backward_call is not None and self.backward_call.has_returned()

    def has_happened(self) -> bool:
        return bool(self.marks) or self.has_backward_returned()

    def clear(self) -> None:
        """Everything is cleaned up. Raises what was interrupted meanwhile."""
        self.marks.clear()
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt
