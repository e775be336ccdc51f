"""The ``.grad`` of parameters whose shards live in host memory.

A reduced gradient is copied to a host buffer while backward goes on. ``.grad`` shows the buffer at
once where that reads no values; these are there after ``settle``, which waits for the copies.
"""

from __future__ import annotations

from meshard._comm.communicator import RecordedWork
from meshard._comm.gradient_buffer import FlatGradients
from meshard._gradients.sharded_grads import ShardedGrads, unrecorded
from meshard._params.unit_params import UnitParams


class HostGrads:
    """The ``.grad`` of the sharded parameters of one unit, in host memory."""

    def __init__(self, storage: UnitParams) -> None:
        assert storage.host_copies is not None
        self._storage = storage
        self._host_copies = storage.host_copies
        self._in_host_memory = ShardedGrads(storage)
        self._arriving: FlatGradients | None = None  # copied to a buffer that no .grad shows yet

    @property
    def are_shown(self) -> bool:
        """Whether ``.grad`` hold everything, once ``HostCopies.wait`` has returned."""
        return self._arriving is None

    def publish(self, new: FlatGradients) -> RecordedWork:
        """Add reduced gradients to ``.grad``; their values are there after ``settle``.

        **Stream:** as ``HostCopies.store``. **Lifetime:** the result keeps ``new`` alive.
        """
        comm = self._storage.comm
        if self._arriving is not None:
            # Otherwise the sum of both would be added to .grad, which rounds in another order.
            self.settle()
        sums = self._in_host_memory.extend(new)
        if sums is not None:
            return self._host_copies.store(sums, new.flat, comm, add=True)
        # New memory each time: the user may still hold the last gradient. torch caches pinned
        # memory, so this costs no call of the driver in later steps.
        host = self._storage.spec.location.empty_like(new.flat)
        copying = self._host_copies.store(host, new.flat, comm)
        arriving = new._replace(flat=host)
        if not self._in_host_memory.publish_unread(arriving):
            self._arriving = arriving
        return copying

    def settle(self) -> None:
        """Wait for all copies and put the gradients into ``.grad``. Blocks the host."""
        self._host_copies.wait()
        if self._arriving is not None:
            arrived, self._arriving = self._arriving, None
            with unrecorded():  # an evaluation settles too, maybe under inference_mode
                self._in_host_memory.publish(arrived)

    def drop_arriving(self, indices: frozenset[int]) -> None:
        """Wait for copies in flight, and drop those of some parameters."""
        self._host_copies.wait()
        if self._arriving is not None:
            self._arriving = self._arriving.without(indices)

    def clear(self) -> None:
        """Clear every ``.grad``, and drop what is in flight."""
        self._host_copies.wait()
        self._arriving = None
        self._in_host_memory.clear()
