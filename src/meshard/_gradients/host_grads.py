"""The .grad of parameters whose shards live in host memory.

A reduced gradient is copied to a pinned buffer while backward goes on. ``settle`` waits for the
copies and puts them into ``.grad``; until then nobody reads that memory. The buffers are used
again, window after window, as soon as no ``.grad`` shows them.
"""

from __future__ import annotations

import torch

from meshard._comm.communicator import RecordedWork
from meshard._comm.gradient_buffer import FlatGradients
from meshard._comm.host_copies import HostCopies
from meshard._engine.param_group import ParamGroup
from meshard._gradients.sharded_grads import ShardedGrads
from meshard._params.storage import MemoryLocation
from meshard._torch.private import num_users


class HostBuffers:
    """Flat host tensors that outlive what is written into them.

    Args:
        home: The memory that they are made of.
    """

    def __init__(self, location: MemoryLocation) -> None:
        self._location = location
        self._buffers: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, but: torch.Tensor | None) -> torch.Tensor:
        """Return a buffer of the size and dtype of ``like`` that nobody looks at.

        Args:
            like: What will be copied into it.
            but: A buffer that is in use, though nobody looks at it.
        """
        kind = (like.numel(), like.dtype)
        # Of other kinds: parameters were frozen or thawed, and may never be as before.
        self._buffers = [b for b in self._buffers if (b.numel(), b.dtype) == kind]
        for buffer in self._buffers:
            if buffer is not but and num_users(buffer) == _ALONE:
                return buffer
        self._buffers.append(self._location.empty(*kind))
        return self._buffers[-1]


_ALONE = num_users(torch.empty(1))


class HostGrads:
    """The ``.grad`` of sharded parameters that live in host memory.

    Args:
        group: Whose gradients.
        link: How they get there.
        home: What memory they live in.
    """

    def __init__(
        self, group: ParamGroup, host_copies: HostCopies, location: MemoryLocation
    ) -> None:
        self._group = group
        self._host_copies = host_copies
        self.offered: FlatGradients | None = None  # see ``offer``
        self._buffers = HostBuffers(location)
        self._shown = ShardedGrads(group)
        self._arriving: FlatGradients | None = (
            None  # on its way into a buffer that no .grad shows yet
        )
        self._is_first = False  # what arrives is not added to any .grad
        self._growing: frozenset[int] = frozenset()  # on their way into what .grad shows

    def be_like(self, other: object) -> None:
        """See ``ShardedGrads.be_like``: there is nothing to choose."""

    def add(self, new: FlatGradients) -> RecordedWork:
        """Add reduced gradients to ``.grad``, once ``settle`` has been called.

        **Stream:** as ``HostCopies.store``. **Lifetime:** what is returned holds ``new``.
        """
        comm = self._group.comm
        if self._arriving is not None:
            # Otherwise the sum of both would be added to .grad: it rounds in another order.
            arriving = self._arriving
            is_alike = arriving.layout is new.layout and arriving.flat.dtype == new.flat.dtype
            if self._is_first and is_alike and not self._shown.has_hooks(new):
                self._arriving = arriving._replace(used=arriving.used | new.used)
                return self._host_copies.add(arriving.flat, new.flat, comm)
            self.settle()
        open_sum = self._shown.open_sum(new)
        if open_sum is not None:
            self._growing |= new.used
            return self._host_copies.add(open_sum, new.flat, comm)
        if self._growing:
            self.settle()
        self._is_first = all(param.sharded.grad is None for param in self._group.params)
        host = self._buffers.take(new.flat, but=self._shown.flat)
        self._arriving = new._replace(flat=host)
        return self._host_copies.store(host, new.flat, comm)

    def offer(self, new: FlatGradients) -> bool:
        """See ``ShardedGrads.offer``: it has to be moved first."""
        return False

    def not_shown(self) -> None:
        """See ``ShardedGrads.not_shown``: the buffers stay."""

    def withdraw_offer(self) -> None:
        """See ``ShardedGrads.withdraw_offer``: nothing is offered."""

    def settle(self) -> None:
        """Wait for all copies, and have the gradients in ``.grad``. Blocks the host."""
        self._host_copies.wait()
        if self._growing:
            grown, self._growing = self._growing, frozenset()
            self._shown.has_grown(grown)
        if self._arriving is not None:
            arrived, self._arriving = self._arriving, None
            self._shown.add(arrived)

    def show_early(self) -> bool:
        """Let ``.grad`` show memory whose values are there after ``HostCopies.wait`` only.

        Return whether that could be done; ``settle`` always can.
        """
        if self._arriving is not None:
            if self._growing or not self._shown.takes_as_is(self._arriving):
                return False
            arrived, self._arriving = self._arriving, None
            self._shown.add(arrived)
        if self._growing:
            grown, self._growing = self._growing, frozenset()
            self._shown.has_grown(grown)
        return True

    def forget(self, indices: frozenset[int]) -> None:
        """Drop what is on its way for some parameters; their ``.grad`` has been cleared."""
        self._host_copies.wait()
        if self._arriving is not None and self._arriving.used & indices:
            self._arriving.erase(indices)
            left = self._arriving.used - indices
            self._arriving = self._arriving._replace(used=left) if left else None
        if self._growing:
            self._shown.drop_hidden(self._growing & indices)
            self._growing -= indices
        self._shown.release_cleared()

    def release_cleared(self) -> None:
        """Note that the user has dropped the gradients; the buffers stay for the next ones."""
        self._shown.release_cleared()

    def clear(self) -> None:
        """Drop every ``.grad``, and what is on its way."""
        self._host_copies.wait()
        self._arriving, self._growing = None, frozenset()
        self._shown.clear()
