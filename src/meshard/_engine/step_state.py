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
    keeps_graph: bool = False  # retain_graph=True, which is the default with create_graph=True
    makes_graph: bool = False  # create_graph=True
    accumulates: bool = True  # the backward adds to .grad; that of torch.autograd.grad does not
    has_nested: bool = False  # a reentrant checkpoint has run a graph task inside this one
    reached: list[Pass] = field(default_factory=list)  # forwards it went through; now in the last


class ManualFinalization:
    """The mode in which the user's ``finalize_backward``, not the last backward, ends a step."""

    def __init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Reset: nothing is left to finalize."""
        self.is_due = False  # a backward has begun, and no finalize_backward has finished since
        # Whether a backward of this step kept its graph. If so, a pipeline schedule may still write
        # gradients of parameters into ``.grad`` without calling backward().
        self.is_split = False
        # The units whose last reductions ``finalize_backward`` has started. ``wait()`` of the
        # handle that it returns finishes them. None: there is nothing to wait for.
        self.started: list[weakref.ref[Any]] | None = None


class Failure:
    """Whether a step of a root was cut off. If so, the next use of the root cleans up first.

    When a backward raises, autograd may call no hook of meshard. But autograd then frees the
    callback that meshard has queued for the end of the backward; a weak reference shows that.
    """

    def __init__(self) -> None:
        self.is_dirty = False  # a failure was seen, and no clean-up has followed yet
        self.generation = 0  # number of clean-ups that have dropped gradients
        self.end: weakref.ref[Any] | None = None  # while a backward runs: the callback for its end
        self.thread = 0  # id of the user's thread, in which the last forward of the root began

    def has_happened(self) -> bool:
        if self.is_dirty or self.end is None:
            return self.is_dirty
        # A device thread of autograd may free the callback late, after the user has caught the
        # exception. So also look whether the user's thread is no longer in any backward.
        is_users = threading.get_ident() == self.thread
        self.is_dirty = self.end() is None or (is_users and graph_task_id() < 0)
        return self.is_dirty

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a failure if the ``with`` block raises (even Ctrl-C), with its work half done."""
        try:
            yield
        except BaseException:
            self.is_dirty = True
            raise
