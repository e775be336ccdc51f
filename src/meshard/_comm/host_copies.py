"""Copies between host memory and the device.

Shards are copied to the device on the gather stream, right before the all-gather that needs them.
Gradients are copied to the host on the ``HOST`` stream, beside the reductions that follow. Copies
from and to pinned memory are asynchronous. The host may read or write the host memory of a unit
only after ``wait``, which blocks. A copy sees what the host wrote before the copy was queued.
"""

from __future__ import annotations

import torch

from meshard._comm.communicator import DONE, CommStream, Communicator, Handle, ranged
from meshard._torch.dtensor import is_plain


class HostCopies:
    """The copies for one unit. The unit computes on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reading: Handle = DONE  # the last copy from host memory
        self._writing: Handle = DONE  # the last copy to host memory

    def fetch(self, shard: torch.Tensor, comm: Communicator, *, label: str) -> torch.Tensor:
        """Return a copy of ``shard`` on the device; ``shard`` must not change until ``wait``.

        **Stream:** the current one, which is that for gathers.

        The host does not cast to the compute dtype before the copy. A cast would halve the bytes,
        but keep the host from launching other work. For 25 million float32 the cast takes 13 ms
        (measured), and then the copy takes only 2 ms less, at 25 GB/s.
        """
        with ranged("copy_to_device", label):
            if is_plain(shard):
                copy = torch.empty_like(shard, device=self._device, pin_memory=False)
                copy.copy_(shard, non_blocking=True)
            else:  # such as NF4Tensor of torchao, which takes these arguments only
                copy = shard.to(self._device, non_blocking=True)
            self._reading = comm.record()
        return copy

    def store(
        self, host: torch.Tensor, source: torch.Tensor, comm: Communicator, *, label: str
    ) -> Handle:
        """Copy ``source [n]`` from the device to ``host [n]``.

        **Lifetime:** the returned handle keeps ``source`` alive until the caller has waited for the
        handle on the current stream. ``host`` has the values after ``HostCopies.wait``.
        """
        with comm.on_stream(CommStream.HOST), ranged("copy_to_host", label):
            self._writing.wait()  # the previous store() may have used another stream
            host.copy_(source, non_blocking=True)
            # Two handles for the same work. The first wait for a handle drops the tensors that it
            # keeps alive, and the next store() may wait for ``_writing`` before the caller has
            # waited. So ``_writing`` keeps nothing, and the handle that the caller gets keeps
            # ``source``.
            self._writing = comm.record()
            return comm.record(source)

    def wait(self) -> None:
        """Block the host until no copy from or to this unit's host memory is in flight."""
        self._reading.synchronize()
        self._writing.synchronize()
        self._reading = self._writing = DONE
