"""Copies between host memory and the device.

All copies are asynchronous. Shards are copied to the device on the gather lane, right before the
all-gather that needs them; gradients go to the host on a lane of their own, beside the reductions
that follow. Nothing here makes the host wait but ``wait``.

Note: Orders.
    * *The host writes, the device reads* (the optimizer steps a shard, the next gather copies it):
      the copy is queued after the host has written, which is order enough.
    * *The device reads or writes, the host writes or reads* (a gradient arrives, the optimizer
      reads it; a gather copies a shard, the optimizer changes it): only after ``wait``.
    * *The device writes one buffer twice* (two microbatches): both copies are on one lane, and the
      second waits for the event of the first, should the lane have changed in between.
"""

from __future__ import annotations

import torch

from meshard._comm.communicator import CommStream, Communicator, RecordedWork


class HostCopies:
    """The copies of one unit.

    Args:
        device: Where the unit computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reading: RecordedWork | None = None  # the last copy from host memory
        self._writing: RecordedWork | None = None  # the last copy to it

    def fetch(self, shard: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """Return a copy of a flat shard on the device, in the dtypes that it has at rest.

        A cast comes after the copy, on the device, also where it would halve the bytes to move.
        A cast on the host blocks the thread that launches everything else: 25 million float32
        take 13 ms to cast to bfloat16 on one core (measured), to save 2 of the 4 ms that 100 MB
        take at 25 GB/s, beside the compute.

        **Stream:** the gather lane. **Lifetime:** ``shard`` must not be written to until ``wait``.
        """
        with comm.on_stream(CommStream.GATHER):
            copy = torch.empty_like(shard, device=self._device, pin_memory=False)
            copy.copy_(shard, non_blocking=True)
            self._reading = comm.record()
        return copy

    def store(self, host: torch.Tensor, source: torch.Tensor, comm: Communicator) -> RecordedWork:
        """Copy ``source [n]`` from the device to ``host [n]``.

        **Stream:** the host lane. **Lifetime:** what is returned holds ``source``; wait for it on
        the current stream to let go. ``host`` holds the values after ``wait``.
        """
        with comm.on_stream(CommStream.HOST):
            self._order_writes()
            host.copy_(source, non_blocking=True)
            return self._record_written(source, comm)

    def add(self, host: torch.Tensor, source: torch.Tensor, comm: Communicator) -> RecordedWork:
        """Add ``source [n]`` on the device to ``host [n]``; stream and lifetime as ``store``.

        The sum is made on the device: fetched, added to, and stored. On the host it would have to
        wait for the copy, in the middle of backward, and would need a second buffer.
        """
        with comm.on_stream(CommStream.HOST):
            self._order_writes()
            total = torch.empty_like(source)
            total.copy_(host, non_blocking=True)
            total.add_(source)
            host.copy_(total, non_blocking=True)
            return self._record_written(source, comm)

    def _record_written(self, source: torch.Tensor, comm: Communicator) -> RecordedWork:
        # Two: whoever waits for the one must not let go of what the other holds for compute.
        self._writing = comm.record()
        return comm.record(source)

    def begin_step(self) -> None:
        """Order what is queued next after the copies that are under way: it reads and writes."""
        for copy in (self._reading, self._writing):
            if copy is not None:
                copy.wait()

    def end_step(self, step: RecordedWork) -> None:
        """Note that a step on the device is the last that writes."""
        self._writing = step

    def _order_writes(self) -> None:
        if self._writing is not None:
            self._writing.wait()

    def wait(self) -> None:
        """Block the host until no copy from or to this unit's host memory is under way."""
        for copy in (self._reading, self._writing):
            if copy is not None:
                copy.synchronize()
        self._reading = self._writing = None
