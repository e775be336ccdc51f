"""Copies between host memory and the device.

All copies are asynchronous; only ``wait`` blocks the host. Shards are copied to the device on the
gather stream, right before the all-gather that needs them. Gradients are copied to the host on the
host stream, beside the reductions that follow.

Note: Order of copies.
    * *The host writes, then the device reads* (the optimizer steps a shard, the next gather copies
      it): the copy is queued after the host has written. Nothing else is needed.
    * *The device reads or writes, then the host writes or reads* (a gradient arrives, the optimizer
      reads it; a gather copies a shard, the optimizer changes it): only after ``wait``.
    * *The device writes one buffer twice* (two microbatches): both copies are on one stream, and
      the second waits for the event of the first, in case the stream has changed in between.
"""

from __future__ import annotations

import torch

from meshard._comm.communicator import CommStream, Communicator, RecordedWork


class HostCopies:
    """The copies of one unit.

    Args:
        device: Device on which the unit computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reading: RecordedWork | None = None  # the last copy from host memory
        self._writing: RecordedWork | None = None  # the last copy to it

    def fetch(self, shard: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """Return a copy of a flat shard on the device, in the same dtypes.

        A cast comes after the copy, on the device, although casting first would move fewer bytes:
        on the host it blocks the thread that launches everything else. 25 million float32 take
        13 ms to cast to bfloat16 on one core (measured), and would save 2 of the 4 ms that 100 MB
        take at 25 GB/s, beside the compute.

        **Stream:** the gather stream. **Lifetime:** ``shard`` must not change until ``wait``.
        """
        with comm.on_stream(CommStream.GATHER):
            copy = torch.empty_like(shard, device=self._device, pin_memory=False)
            copy.copy_(shard, non_blocking=True)
            self._reading = comm.record()
        return copy

    def store(self, host: torch.Tensor, source: torch.Tensor, comm: Communicator) -> RecordedWork:
        """Copy ``source [n]`` from the device to ``host [n]``.

        **Stream:** the host stream. **Lifetime:** the result holds ``source`` until it is waited
        for on the current stream. ``host`` holds the values after ``wait``.
        """
        with comm.on_stream(CommStream.HOST):
            self._order_writes()
            host.copy_(source, non_blocking=True)
            return self._record_written(source, comm)

    def add(self, host: torch.Tensor, source: torch.Tensor, comm: Communicator) -> RecordedWork:
        """Add ``source [n]`` on the device to ``host [n]``; stream and lifetime as ``store``.

        The sum is computed on the device. On the host it would have to wait for the copy, in the
        middle of backward, and would need a second buffer.
        """
        with comm.on_stream(CommStream.HOST):
            self._order_writes()
            total = torch.empty_like(source)
            total.copy_(host, non_blocking=True)
            total.add_(source)
            host.copy_(total, non_blocking=True)
            return self._record_written(source, comm)

    def _record_written(self, source: torch.Tensor, comm: Communicator) -> RecordedWork:
        # Two records: waiting for one must not drop what the other keeps alive for compute.
        self._writing = comm.record()
        return comm.record(source)

    def _order_writes(self) -> None:
        if self._writing is not None:
            self._writing.wait()

    def wait(self) -> None:
        """Block the host until no copy from or to this unit's host memory is in flight."""
        for copy in (self._reading, self._writing):
            if copy is not None:
                copy.synchronize()
        self._reading = self._writing = None
