"""Which communicator serves a device."""

from __future__ import annotations

import contextlib
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


def make_communicator(device: torch.device, *, share_memory: bool = True) -> Communicator:
    """Return a communicator for tensors on ``device``.

    Without ``share_memory`` CPU tensors are sent through sockets, and groups are spared the two
    all-gathers by which ranks find out whether they share a host.
    """
    if _instead is not None:
        return _instead(device)
    if device.type != "cpu":
        return StreamCommunicator(torch.get_device_module(device))
    return SharedMemoryCommunicator() if share_memory else WorkCommunicator()
