"""The state of a step of one root: the backward that runs, and whether the step was cut off."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshard._engine.program import Pass
from meshard._torch.private import graph_task_id


@dataclass(eq=False, slots=True)
class BackwardRun:
    """A backward that is running."""

    number: int  # backwards of a root are numbered as they begin
    graph_task: int = -1  # autograd's id of the graph task (engine run) that began it
    keeps_graph: bool = False  # another backward may go through its graph later
    makes_graph: bool = False  # create_graph=True
    accumulates: bool = True  # it adds to .grad; torch.autograd.grad does not
    has_nested: bool = False  # another graph task (of a reentrant checkpoint) began inside it
    reached: list[Pass] = field(default_factory=list)  # passes begun; the last one runs


class ManualFinalization:
    """The mode in which windows of microbatches end at ``finalize_backward``, not at a backward."""

    def __init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Reset: nothing is left to finalize."""
        self.is_due = False  # a backward ran, and no finalize_backward has finished since
        # Whether a backward of this step kept its graph. If so, a pipeline schedule may still write
        # gradients of parameters into ``.grad`` without calling backward().
        self.is_split = False
        # The units whose last reductions finalize_backward has started. ``wait()`` of its handle
        # finishes them. None: there is no such handle.
        self.started: list[weakref.ref[Any]] | None = None


class Failure:
    """Whether a step of a root was cut off. If so, the next use of the root cleans up first.

    When a backward raises, autograd may run none of our code. But it drops the callback for the end
    of the backward, and a weak reference to the callback shows that.
    """

    def __init__(self) -> None:
        self.is_dirty = False  # a failure was seen, and is not cleaned up
        self.generation = 0  # number of clean-ups that have dropped gradients
        self.end: weakref.ref[Any] | None = None  # while a backward runs: the callback for its end
        self.thread = 0  # id of the user's thread, in which the last pass began

    def has_happened(self) -> bool:
        if self.is_dirty or self.end is None:
            return self.is_dirty
        # A device thread of autograd may drop the callback late, after the user has caught the
        # exception. So also look whether the user's thread has left the backward.
        is_users = threading.get_ident() == self.thread
        self.is_dirty = self.end() is None or (is_users and graph_task_id() < 0)
        return self.is_dirty

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a failure if the body raises, even by an interrupt: its work is half done."""
        try:
            yield
        except BaseException:
            self.is_dirty = True
            raise
