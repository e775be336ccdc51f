"""The state of a step of one root: what runs, and whether it was cut off."""

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
    """A backward, while it runs."""

    number: int  # backwards of a root are numbered as they begin
    graph_task: int = -1  # autograd's id of the graph task (engine run) that began it
    keeps_graph: bool = False  # another backward may follow through its graph
    makes_graph: bool = False  # create_graph=True
    accumulates: bool = True  # it adds to .grad; torch.autograd.grad does not
    has_nested: bool = False  # another graph task (of a reentrant checkpoint) began inside it
    reached: list[Pass] = field(default_factory=list)  # whose backward has begun; the last runs


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
        # The units whose last reductions finalize_backward has started, and wait() of its handle
        # finishes. None: nothing is to be waited for.
        self.started: list[weakref.ref[Any]] | None = None


class Failure:
    """Whether a step of a root was cut off. If so, the next use of the root cleans up first.

    No exception handler is certain to run in autograd. So a weak reference tells: autograd holds
    the callback for the end of a backward, and drops it if the backward raises.
    """

    def __init__(self) -> None:
        self.is_dirty = False  # what ends a forward, finishes gradients or cleans up has raised
        self.generation = 0  # how often gradients were dropped
        self.end: weakref.ref[Any] | None = None  # while a backward runs: the callback for its end
        self.thread = 0  # the user's: that in which the last pass began

    def has_happened(self) -> bool:
        if self.is_dirty or self.end is None:
            return self.is_dirty
        # A thread of autograd for a device may drop the callback only after the user has caught the
        # exception. But then the user's thread is in no backward any more.
        is_users = threading.get_ident() == self.thread
        self.is_dirty = self.end() is None or (is_users and graph_task_id() < 0)
        return self.is_dirty

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a failure if the body raises, as an interrupt may. It leaves things half done."""
        try:
            yield
        except BaseException:
            self.is_dirty = True
            raise
