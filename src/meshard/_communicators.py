"""Which communicator serves a device."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch

from meshard._comm.communicator import Communicator
from meshard._comm.cpu import WorkCommunicator
from meshard._comm.streams import StreamCommunicator
from meshard._shared_memory.communicator import SharedMemoryCommunicator

# Makes the communicators, while a block of ``communicators_from`` runs.
_instead: Callable[[torch.device], Communicator] | None = None


@contextlib.contextmanager
def communicators_from(make: Callable[[torch.device], Communicator]) -> Iterator[None]:
    """Let ``make`` make the communicators of all roots whose first step begins inside."""
    global _instead
    before, _instead = _instead, make
    try:
        yield
    finally:
        _instead = before


@functools.cache
def _wait_at_exit() -> None:
    """Let the threads of gloo drop the tensors of their last collectives before Python ends.

    A thread that drops one later asks Python for its lock, and the process is aborted ("terminate
    called without an active exception": pytorch/pytorch#179291).
    """
    atexit.register(time.sleep, 0.05)  # seconds


def make_communicator(device: torch.device, *, share_memory: bool = True) -> Communicator:
    """Return a communicator for tensors on ``device``.

    Without ``share_memory`` CPU tensors are sent through sockets, and groups are spared the two
    all-gathers by which ranks find out whether they share a host.
    """
    if _instead is not None:
        return _instead(device)
    if device.type != "cpu":
        return StreamCommunicator(torch.get_device_module(device))
    _wait_at_exit()
    return SharedMemoryCommunicator() if share_memory else WorkCommunicator()
