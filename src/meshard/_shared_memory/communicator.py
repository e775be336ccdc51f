"""Collectives between ranks of one host through shared memory.

A gather copies the neighbours' shards from where they lie into whole parameters, and a
reduce-scatter adds up the neighbours' rows from where they were packed. Nothing goes through a
socket, and no thread beside the caller's takes time from compute. The numbers are those of
``WorkCommunicator``, bit for bit, which does what is left: groups across hosts, and all-reduces of
more than two ranks, which gloo adds up in an order of its own.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from meshard._comm import cpu
from meshard._comm.communicator import (
    CommStream,
    GatheredViews,
    InFlight,
    Rows,
    StepPhase,
    profiled,
)
from meshard._comm.cpu import WorkCommunicator
from meshard._shared_memory.channel import Channel, open_channel


class _Receiving:
    """A collective that this rank takes part in by reading one message of every neighbour."""

    __slots__ = ("_channel", "_is_over", "_message")

    def __init__(self, channel: Channel, message: int) -> None:
        self._channel = channel
        self._message = message
        self._is_over = False

    def _read(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for the neighbours, and do this rank's part."""
        if not self._is_over:
            self._read()
            self._end()

    def poll(self) -> bool:
        """See ``InFlight.poll``."""
        if not self._is_over and not self._channel.is_published(self._message):
            return False
        self.wait()
        return True

    def _end(self) -> None:
        self._is_over = True
        self._channel.acknowledge(self._message)

    def __del__(self) -> None:
        # Dropped, say with the model: the neighbours need not wait for this rank. A process that
        # was forked has a copy of this object, but does not speak for the rank. (What could not be
        # started has no such attribute.)
        if not getattr(self, "_is_over", True) and self._channel.process == os.getpid():
            self._channel.acknowledge(self._message)


class _ViewGather(_Receiving):
    """An all-gather of which each row is read where it lies."""

    __slots__ = ("_source",)

    def __init__(self, channel: Channel, source: torch.Tensor) -> None:
        super().__init__(channel, channel.publish(source))
        self._source = source

    def rows(self) -> list[torch.Tensor]:
        """See ``GatheredViews.rows``."""
        source, receive, message = self._source, self._channel.receive, self._message
        rows = [
            receive(message, other, source.numel(), source.dtype) for other in self._channel.others
        ]
        rows.insert(self._channel.rank, source)
        return rows

    def release(self) -> None:
        """See ``GatheredViews.release``."""
        if not self._is_over:
            self._end()

    def _read(self) -> None:
        self.rows()


class _Gather(_ViewGather):
    """An all-gather into ``output [ranks * n]``."""

    __slots__ = ("_output",)

    def __init__(self, channel: Channel, output: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__(channel, source)
        self._output = output

    def _read(self) -> None:
        torch.cat(self.rows(), out=self._output)


class _Scatter(_Receiving):
    """A reduce-scatter of ``source``, a row of ``n`` for every rank, into ``output [n]``."""

    __slots__ = ("_keep_signs", "_output", "_own")

    def __init__(
        self, channel: Channel, output: torch.Tensor, source: Rows, *, keep_signs: bool
    ) -> None:
        super().__init__(channel, channel.publish_rows(source))
        self._output = output
        self._keep_signs = keep_signs
        self._own = source[channel.rank]

    def _read(self) -> None:
        own, channel = self._own, self._channel
        rows = [
            channel.receive_own_row(self._message, other, own.numel(), own.dtype)
            for other in channel.others
        ]
        if len(rows) == 1:
            cpu.sum_two(self._output, rows[0], own)
        else:
            rows.insert(channel.rank, own)
            cpu.sum_rows(self._output, torch.stack(rows), keep_signs=self._keep_signs)


class _Sum(_Receiving):
    """An all-reduce of ``buffer`` between two ranks, in place or into ``output``."""

    __slots__ = ("_buffer", "_output")

    def __init__(self, channel: Channel, buffer: torch.Tensor, output: torch.Tensor | None) -> None:
        # In place, what the neighbour reads must not become the sum.
        super().__init__(channel, channel.publish(buffer, copy=output is None))
        self._buffer = buffer
        self._output = buffer if output is None else output

    def _read(self) -> None:
        (other,) = self._channel.others
        buffer = self._buffer
        theirs = self._channel.receive(self._message, other, buffer.numel(), buffer.dtype)
        torch.add(buffer, theirs, out=self._output)


class _Channels(dict[dist.ProcessGroup, Channel | None]):
    """The neighbours in each group; None where ranks do not reach one another's memory.

    To look for a group that is not there is collective: its ranks meet. Groups that were found live
    as long as this, also when they have been destroyed.

    Args:
        is_wanted: Whether this rank wants to.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        super().__init__()
        self.met: list[Channel] = []
        self._is_wanted = is_wanted

    def __missing__(self, group: dist.ProcessGroup) -> Channel | None:
        is_gloo = group.size() > 1 and dist.get_backend(group) == "gloo"
        found = open_channel(group, is_wanted=self._is_wanted) if is_gloo else None
        if found is not None:
            self.met.append(found)
        self[group] = found
        return found


class SharedMemoryCommunicator(WorkCommunicator):
    """Collectives between ranks that reach one another's memory; by sockets where they do not.

    Which it is, a group finds out at its first collective: no rank need know the hosts' names.
    ``MESHARD_SHARED_MEMORY=0`` on one rank, when the communicator is made, keeps its groups to
    sockets.
    """

    def __init__(self) -> None:
        super().__init__()
        is_wanted = os.environ.get("MESHARD_SHARED_MEMORY", "1") != "0"
        self._channel = _Channels(is_wanted=is_wanted)

    def allocate(
        self,
        numel: int,
        comm_stream: CommStream,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        is_sent: bool = False,
    ) -> torch.Tensor:
        """See ``Communicator.allocate``: what is sent lies where the neighbours read it."""
        channel = self._channel[group] if is_sent else None
        if channel is not None:
            return channel.allocate(numel, dtype)
        return super().allocate(numel, comm_stream, dtype=dtype, device=device, group=group)

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """See ``Communicator.release_cached_memory``."""
        for channel in self._channel.met:  # every unit asks before an optimizer steps
            channel.release_cached_memory(keep_for=keep_for)

    def allocate_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """See ``Communicator.allocate_rows``."""
        channel = self._channel[group]
        if channel is None:
            return super().allocate_rows(numel, dtype, group=group, own=own)
        return channel.allocate_rows(numel, dtype, own)

    def gather_views(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> GatheredViews | None:
        """See ``Communicator.gather_views``."""
        channel = self._channel[group]
        if channel is None:
            return super().gather_views(source, group=group, label=label)
        self.observe("all_gather", source, group, label, rows=group.size())
        with profiled("all_gather", label):
            return _ViewGather(channel, source)

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        """See ``Communicator.all_gather``."""
        channel = self._channel[group]
        if channel is None:
            return super().all_gather(output, source, group=group, label=label)
        self.observe("all_gather", output, group, label)
        with profiled("all_gather", label):
            return _Gather(channel, output, source)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: Rows,
        *,
        group: dist.ProcessGroup,
        label: str,
        keep_signs: bool = True,
    ) -> InFlight:
        """See ``Communicator.reduce_scatter``."""
        channel = self._channel[group]
        if channel is None:
            return super().reduce_scatter(
                output, source, group=group, label=label, keep_signs=keep_signs
            )
        self.observe("reduce_scatter", source[0], group, label, rows=group.size())
        with profiled("reduce_scatter", label):
            return _Scatter(channel, output, source, keep_signs=keep_signs)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        output: torch.Tensor | None = None,
    ) -> InFlight:
        """See ``Communicator.all_reduce``."""
        channel = self._channel[group] if group.size() == 2 else None
        if channel is None:
            return super().all_reduce(buffer, group=group, label=label, output=output)
        self.observe("all_reduce", buffer, group, label)
        with profiled("all_reduce", label):
            return _Sum(channel, buffer, output)

    def sums_apart(self, group: dist.ProcessGroup) -> bool:
        """See ``Communicator.sums_apart``: two ranks do."""
        return group.size() == 2 and self._channel[group] is not None
