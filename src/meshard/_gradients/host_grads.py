"""The ``.grad`` of parameters whose shards live in host memory.

A reduced gradient is copied to a host buffer while backward goes on. ``settle`` waits for the
copies and publishes them in ``.grad``; until then nothing reads the buffer.
"""

from __future__ import annotations

import torch

from meshard._comm.communicator import RecordedWork
from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._comm.host_copies import HostCopies
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._params.storage import MemoryLocation
from meshard._params.unit_params import UnitParams


class HostGrads:
    """The ``.grad`` of the sharded parameters of one unit, in host memory.

    Args:
        storage: The parameters.
        host_copies: Copies the gradients from the device.
        location: The host memory.
    """

    def __init__(
        self, storage: UnitParams, host_copies: HostCopies, location: MemoryLocation
    ) -> None:
        self._storage = storage
        self._host_copies = host_copies
        self._location = location
        self._in_host_memory = ShardedGrads(storage)
        self._arriving: FlatGradients | None = None  # copied to a buffer that no .grad shows yet
        self._is_first = False  # what arrives is not added to any .grad
        self._growing: frozenset[int] = frozenset()  # added to sums that .grad shows

    @property
    def has_arrivals(self) -> bool:
        """Whether the ``.grad`` of an unsharded parameter is a new gradient of autograd: always."""
        return True

    def free_bucket(self, layout: GradientLayout, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for unsharded gradients that is reused in every step: there is none."""
        return None

    def publish(self, new: FlatGradients) -> RecordedWork:
        """Add reduced gradients to ``.grad``; they are visible after ``settle``.

        **Stream:** as ``HostCopies.store``. **Lifetime:** the result keeps ``new`` alive.
        """
        comm = self._storage.comm
        if self._arriving is not None:
            # Otherwise the sum of both would be added to .grad, which rounds in another order.
            arriving = self._arriving
            is_alike = arriving.layout is new.layout and arriving.flat.dtype == new.flat.dtype
            if self._is_first and is_alike and not self._in_host_memory.has_hooks(new):
                self._arriving = arriving._replace(used=arriving.used | new.used)
                return self._host_copies.store(arriving.flat, new.flat, comm, add=True)
            self.settle()
        open_sum = self._in_host_memory.open_sum(new)
        if open_sum is not None:
            self._growing |= new.used
            return self._host_copies.store(open_sum, new.flat, comm, add=True)
        if self._growing:
            self.settle()
        self._is_first = all(param.sharded.grad is None for param in self._storage.params)
        # New memory each time: the user may still hold the last gradient. torch caches pinned
        # memory, so this costs no call of the driver in later steps.
        host = self._location.empty(new.flat.numel(), new.flat.dtype)
        self._arriving = new._replace(flat=host)
        return self._host_copies.store(host, new.flat, comm)

    def settle(self) -> None:
        """Wait for all copies and put the gradients into ``.grad``. Blocks the host."""
        self._host_copies.wait()
        self._publish_growth()
        if self._arriving is not None:
            arrived, self._arriving = self._arriving, None
            self._in_host_memory.publish(arrived)

    def show_early(self) -> bool:
        """Set ``.grad`` to memory whose values are there after ``HostCopies.wait`` only.

        Returns:
            Whether that was possible. ``settle`` always is.
        """
        if self._arriving is not None:
            if self._growing or not self._in_host_memory.takes_as_is(self._arriving):
                return False
            arrived, self._arriving = self._arriving, None
            self._in_host_memory.publish(arrived)
        self._publish_growth()
        return True

    def _publish_growth(self) -> None:
        if self._growing:
            grown, self._growing = self._growing, frozenset()
            self._in_host_memory.has_grown(grown)

    def forget(self, indices: frozenset[int]) -> None:
        """Drop copies in flight of parameters whose ``.grad`` was cleared."""
        self._host_copies.wait()
        if self._arriving is not None and self._arriving.used & indices:
            self._arriving.erase(indices)
            left = self._arriving.used - indices
            self._arriving = self._arriving._replace(used=left) if left else None
        if self._growing:
            self._in_host_memory.drop_hidden(self._growing & indices)
            self._growing -= indices
        self._in_host_memory.release_cleared()

    def release_cleared(self) -> None:
        """Drop the flat sums once the user has cleared every ``.grad``."""
        self._in_host_memory.release_cleared()

    def clear(self) -> None:
        """Clear every ``.grad``, and drop what is in flight."""
        self._host_copies.wait()
        self._arriving, self._growing = None, frozenset()
        self._in_host_memory.clear()
