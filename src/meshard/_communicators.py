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

_EXIT_SECONDS = 0.05  # see _wait_at_exit
# The function that makes communicators inside a ``communicators_from`` block; else None.
_instead: Callable[[torch.device], Communicator] | None = None


@contextlib.contextmanager
def communicators_from(make: Callable[[torch.device], Communicator]) -> Iterator[None]:
    """Inside the block, call ``make`` for each new communicator, such as that of a root."""
    global _instead
    before, _instead = _instead, make
    try:
        yield
    finally:
        _instead = before


@functools.cache
def _wait_at_exit() -> None:
    """Let the process sleep as it exits, so that gloo's threads can free what they have sent.

    A thread of gloo needs the GIL to free the tensors of its last collective. It may do so after
    the thread that waited for this collective has gone on. An interpreter that is ending refuses
    the GIL, and then the process aborts ("terminate called without an active exception"). This
    happens even if the user has destroyed the process groups, because a mesh or a sharded module
    keeps their threads alive.
    """
    atexit.register(time.sleep, _EXIT_SECONDS)


def make_communicator(device: torch.device, *, share_memory: bool = True) -> Communicator:
    """Return a communicator for tensors on ``device``.

    Without ``share_memory`` CPU tensors are sent through sockets. This saves each group the two
    all-gathers by which its ranks find out whether they can share memory.
    """
    if _instead is not None:
        return _instead(device)
    _wait_at_exit()
    if device.type != "cpu":
        return StreamCommunicator(torch.get_device_module(device))
    return SharedMemoryCommunicator() if share_memory else WorkCommunicator()
