"""Use ``listed()`` to see what a trace is told, without a trace."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from meshard._comm import spans


class Listed:
    """A recorder that lists what it is told, each with the time."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []
        self.event: Any = None

    def tell(self, what: str) -> None:
        self.told.append((what, time.monotonic()))

    @contextlib.contextmanager
    def span(self, what: str, label: str, clock: Any, event: Any) -> Iterator[None]:
        self.event = event
        self.tell(f"begin {what}")
        yield
        self.tell(f"leave {what}")
        self.event = None

    def issued(self) -> Any:
        return None if self.event is None else self

    def ends_later(self) -> None:
        self.tell("ends later")

    def end(self) -> None:
        self.tell("end")

    def waited(self, began: Any, ended: Any) -> None:
        self.tell("waited")

    def enter(self, phase: str, label: str, clock: Any) -> None:
        self.tell(f"{phase} {label}")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.told]


@contextlib.contextmanager
def listed() -> Iterator[Listed]:
    """Record in a ``Listed`` what happens inside."""
    recorder = Listed()
    spans.start(recorder)
    try:
        yield recorder
    finally:
        spans.stop()
