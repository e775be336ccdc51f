"""Choice of the communicator for a device."""

from __future__ import annotations

import torch

from meshard._comm.communicator import Communicator
from meshard._comm.divergence import CheckedCommunicator, is_debugging
from meshard._comm.streams import StreamCommunicator
from meshard._shared_memory.communicator import SharedMemoryCommunicator


def make_communicator(device: torch.device) -> Communicator:
    """Return a communicator for tensors on ``device``; a checked one under ``MESHARD_DEBUG=1``."""
    communicator: Communicator
    if device.type != "cpu":
        communicator = StreamCommunicator(torch.get_device_module(device))
    else:
        communicator = SharedMemoryCommunicator()
    return CheckedCommunicator(communicator) if is_debugging() else communicator
