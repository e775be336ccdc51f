"""The state of a step: what runs, what waits for ``finalize_backward``, and what was cut off.

A ``BackwardRun`` exists while a backward runs, and a ``ManualFinalization`` while
``set_manual_backward_finalization(True)`` is in force.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshard._torch.private import BackwardCall

if TYPE_CHECKING:  # circular at run time
    from meshard._engine.schedule import ForwardPass
    from meshard._engine.unit import Unit


@dataclass(eq=False, slots=True)
class BackwardRun:
    """A backward, while it runs."""

    graph_task: int = -1  # autograd's id of the graph task (engine run) that began it
    thread: int = 0
    keeps_graph: bool = False  # another backward may follow through its graph
    accumulates: bool = True  # it adds to .grad; torch.autograd.grad does not
    has_nested: bool = False  # another graph task began inside it
    reached: list[ForwardPass] = field(default_factory=list)  # the passes whose backward has begun
    current_pass: ForwardPass | None = None  # the pass of the unit that began its backward last
    # Weak references to the callback that autograd calls at the end of the backward. If the
    # backward raises, autograd drops the callback instead, and these references notice it.
    ends: list[weakref.ref[Any]] = field(default_factory=list)


class ManualFinalization:
    """The mode in which ``finalize_backward``, and no backward, ends windows of microbatches."""

    def __init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Begin a step: nothing is to be finalized."""
        self.is_due = False  # a backward ran, and no finalize_backward has finished since
        # Whether a backward of this step kept its graph. If so, a pipeline schedule may still write
        # gradients of parameters into ``.grad`` without calling backward().
        self.is_split = False
        # The units whose last reductions finalize_backward has started. wait() of its handle
        # finishes them. None: nothing is to be waited for.
        self.started: list[weakref.ref[Unit]] | None = None


class Failure:
    """Whether a step of a root was cut off. If so, the next use of the root cleans up first.

    In autograd, and during a clean-up, no exception handler is certain to run. So the code there
    sets a mark before an action and clears it afterwards. A mark that is still set at the next use
    says that the action was cut off.
    """

    def __init__(self) -> None:
        self.marks: list[object] = []  # not empty: clean up before the next use
        self.num_voided = 0  # how often a clean-up has dropped gradients
        self.backward_call: BackwardCall | None = None  # the user's call of the backward that runs
        # An exception, such as KeyboardInterrupt, that was raised in a weakref callback. Python
        # swallows it there, so ``clear`` raises it again.
        self.interrupt: BaseException | None = None

    def has_backward_returned(self) -> bool:
        """Whether the user's call of backward is over, though no callback has recorded its end.

        If so, the backward has raised, and autograd's thread for a device has not dropped the
        callback yet: it may do that only after the exception has reached the user.
        """
        return self.backward_call is not None and self.backward_call.has_returned()

    def has_happened(self) -> bool:
        return bool(self.marks) or self.has_backward_returned()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Set a mark if the body raises. The body finishes gradients, and some are lost then."""
        try:
            yield
        except BaseException:
            self.marks.append("cut off")
            raise

    def clear(self) -> None:
        """Clear all marks, after cleaning up. Raises the recorded interrupt, if there is one."""
        self.marks.clear()
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt
