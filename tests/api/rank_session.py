"""Ranks that live longer than one call."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.support.threads import run_threads


class RankSession:
    """Ranks on threads that each hold a player, and do what they are told together.

    Args:
        num_ranks: World size.
        make: Called on every rank; what it returns is the rank's player.
    """

    def __init__(self, num_ranks: int, make: Callable[[], Any]) -> None:
        self._make = make
        self._commands: list[queue.Queue[Callable[[Any], Any] | None]]
        self._commands = [queue.Queue() for _ in range(num_ranks)]
        self._replies: queue.Queue[BaseException | None] = queue.Queue()
        self.has_failed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_threads(self._serve, len(self._commands))
        except BaseException as error:
            self._replies.put(error)

    def _serve(self) -> None:
        player = self._make()
        commands = self._commands[dist.get_rank()]
        while (command := commands.get()) is not None:
            try:
                command(player)
            except BaseException as error:  # at once: other ranks wait for their next command
                self._replies.put(error)
                raise
            self._replies.put(None)

    def do(self, command: Callable[[Any], Any]) -> None:
        """Call ``command(player)`` on every rank, and return when all have done it."""
        for commands in self._commands:
            commands.put(command)
        for _ in self._commands:
            error = self._replies.get(timeout=90)
            if error is not None:
                self.has_failed = True
                raise error

    def close(self) -> None:
        """End the ranks. What ``do`` has not raised yet is raised here."""
        for commands in self._commands:
            commands.put(None)
        self._thread.join(90)
        while not self._replies.empty() and not self.has_failed:
            error = self._replies.get()
            if error is not None:
                raise error
