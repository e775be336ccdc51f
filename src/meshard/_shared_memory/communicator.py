"""Collectives between ranks of one host through shared memory.

A gather copies the shards of the other ranks from their memory into unsharded parameters, and a
reduce-scatter adds the rows of the other ranks from where they were packed. Nothing goes through a
socket, and no second thread takes time from compute. The numbers are those of ``WorkCommunicator``,
bit for bit, which does the rest: groups across hosts, and all-reduces of more than two ranks, which
gloo adds in an order of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshard._comm import cpu
from meshard._comm.communicator import (
    CommStream,
    Communicator,
    GatheredViews,
    InFlight,
    Rows,
    StepPhase,
    profiled,
)
from meshard._comm.cpu import WorkCommunicator
from meshard._comm.streams import StreamCommunicator
from meshard._shared_memory.channel import Channel, open_channel
from meshard._shared_memory.segment import WHY_UNSUPPORTED

_VARIABLE = "MESHARD_SHARED_MEMORY"


def make_communicator(device: torch.device) -> Communicator:
    """Return a communicator for tensors on ``device``."""
    if device.type != "cpu":
        return StreamCommunicator(torch.get_device_module(device))
    return SharedMemoryCommunicator()


class _Receiving:
    """A collective in which this rank reads one message of every other rank."""

    __slots__ = ("_channel", "_is_done", "_message")

    def __init__(self, channel: Channel, message: int) -> None:
        self._channel = channel
        self._message = message
        self._is_done = False

    def _read(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        if not self._is_done:
            self._read()
            self.release()

    def poll(self) -> bool:
        if not self._is_done and not self._channel.is_published(self._message):
            return False
        self.wait()
        return True

    def release(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._channel.acknowledge(self._message)

    def __del__(self) -> None:
        # Dropped unfinished, for example with the model: the other ranks need not wait for this
        # one. A forked process has a copy of this object but is not the rank. (A collective that
        # could not be started has no such attribute.)
        if not getattr(self, "_is_done", True) and self._channel.process == os.getpid():
            self._channel.acknowledge(self._message)


class _Gather(_Receiving):
    """An all-gather into ``output [ranks * n]``; without one, only ``rows`` can be read."""

    __slots__ = ("_output", "_source")

    def __init__(
        self, channel: Channel, source: torch.Tensor, output: torch.Tensor | None = None
    ) -> None:
        super().__init__(channel, channel.publish(source))
        self._source = source
        self._output = output

    def rows(self) -> list[torch.Tensor]:
        source, receive, message = self._source, self._channel.receive, self._message
        rows = [
            receive(message, other, source.numel(), source.dtype) for other in self._channel.others
        ]
        rows.insert(self._channel.rank, source)
        return rows

    def _read(self) -> None:
        rows = self.rows()
        if self._output is not None:
            torch.cat(rows, out=self._output)


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
    """An all-reduce of ``buffer`` between two ranks, in place."""

    __slots__ = ("_buffer",)

    def __init__(self, channel: Channel, buffer: torch.Tensor) -> None:
        # A copy is published: the sum must not overwrite what the other rank reads.
        super().__init__(channel, channel.publish(buffer, copy=True))
        self._buffer = buffer

    def _read(self) -> None:
        (other,) = self._channel.others
        buffer = self._buffer
        theirs = self._channel.receive(self._message, other, buffer.numel(), buffer.dtype)
        buffer.add_(theirs)


class _Channels(dict[dist.ProcessGroup, Channel | None]):
    """The channel of each group; None where ranks do not reach one another's memory.

    The first look-up of a group is collective. Channels live as long as this object, also when
    their group has been destroyed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_wanted = os.environ.get(_VARIABLE, "1") != "0"

    def __missing__(self, group: dist.ProcessGroup) -> Channel | None:
        channel = open_channel(group, is_wanted=self.is_wanted) if _is_candidate(group) else None
        self[group] = channel
        return channel


def _is_candidate(group: dist.ProcessGroup) -> bool:
    return group.size() > 1 and dist.get_backend(group) == "gloo"


class SharedMemoryCommunicator(WorkCommunicator):
    """Collectives between ranks that reach one another's memory; by sockets where they do not.

    Each group finds out at its first collective. ``MESHARD_SHARED_MEMORY=0`` on one rank, when the
    communicator is made, keeps its groups to sockets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._channels = _Channels()

    def _channel_before(self, group: dist.ProcessGroup) -> Channel | None:
        """Return the channel of ``group`` for memory of a collective that is still to come.

        None if the user's collectives run instead. Where collectives are checked, none is opened
        here: ranks that differ would open channels of different models with one another, and the
        check comes only with the collective.
        """
        if self._is_custom:
            return None
        return self._channels[group] if self._root_numbers is None else self._channels.get(group)

    def memory_report(self, groups: Iterable[dist.ProcessGroup]) -> str:
        candidates = [group for group in dict.fromkeys(groups) if _is_candidate(group)]
        if not candidates:
            return ""
        if WHY_UNSUPPORTED or not self._channels.is_wanted:
            return f"shared memory: off: {WHY_UNSUPPORTED or f'{_VARIABLE}=0'}"
        if any(group not in self._channels for group in candidates):
            return "shared memory: decided at the first collective of each process group"
        num_open = sum(self._channels[group] is not None for group in candidates)
        if num_open == len(candidates):
            return "shared memory: on"
        where = f" in {len(candidates) - num_open} of {len(candidates)} groups" if num_open else ""
        return (
            f"shared memory: off{where}: the ranks are on several hosts, one may not open the "
            f"memory of another, or one has set {_VARIABLE}=0"
        )

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
        channel = self._channel_before(group) if is_sent else None
        if channel is not None:
            return channel.allocate(numel, dtype)
        return super().allocate(
            numel, comm_stream, dtype=dtype, device=device, group=group, is_sent=is_sent
        )

    def allocate_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        channel = self._channel_before(group)
        if channel is None:
            return super().allocate_rows(numel, dtype, group=group, own=own)
        return channel.allocate_rows(numel, dtype, own)

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        for channel in self._channels.values():
            if channel is not None:
                channel.release_cached_memory(keep_for=keep_for)

    def gather_views(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> GatheredViews | None:
        channel = self._channel_before(group)
        if channel is None:
            return super().gather_views(source, group=group, label=label)
        self._announce("all_gather", source, group, label, rows=group.size())
        with profiled("all_gather", label):
            return _Gather(channel, source)

    def _start_all_gather(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
    ) -> InFlight:
        channel = self._channels[group]
        if channel is None:
            return super()._start_all_gather(output, source, group)
        return _Gather(channel, source, output)

    def _start_reduce_scatter(
        self, output: torch.Tensor, source: Rows, group: dist.ProcessGroup, *, keep_signs: bool
    ) -> InFlight:
        channel = self._channels[group]
        if channel is None:
            return super()._start_reduce_scatter(output, source, group, keep_signs=keep_signs)
        return _Scatter(channel, output, source, keep_signs=keep_signs)

    def _start_all_reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> InFlight:
        channel = self._channels[group] if group.size() == 2 else None
        if channel is None:
            return super()._start_all_reduce(buffer, group)
        return _Sum(channel, buffer)
