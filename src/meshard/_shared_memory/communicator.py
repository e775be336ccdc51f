"""Collectives between ranks of one host through shared memory.

A gather copies the shards of the other ranks from their memory into unsharded parameters, and a
reduce-scatter adds the rows of the other ranks from where they were packed. Nothing goes through a
socket, and no second thread takes time from compute. Results are, bit for bit, those of the base
class ``WorkCommunicator``. The base class still serves groups that cannot share memory, every
all-to-all, and all-reduces of more than two ranks: gloo adds those up in an order of its own.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from meshard._comm import cpu, spans
from meshard._comm.communicator import (
    GatherInFlight,
    InFlight,
    Receive,
    Rows,
    StepPhase,
)
from meshard._comm.cpu import WorkCommunicator
from meshard._shared_memory.channel import Channel, Name, open_channel
from meshard._shared_memory.segment import WHY_UNSUPPORTED
from meshard._torch.private import backend_name

_VARIABLE = "MESHARD_SHARED_MEMORY"


class _Receiving:
    """A collective in which this rank reads one message of every other rank.

    ``read`` must not refer to this object. Such a cycle would delay ``__del__``, which acknowledges
    the message.
    """

    def __init__(self, channel: Channel, message: int, read: Callable[[], object]) -> None:
        self._channel = channel
        self._message = message
        self._read: Callable[[], object] | None = read
        self._issued = None if spans.recorder is None else spans.issued()
        self._began_to_read = 0.0  # seconds of ``time.monotonic``; 0: not begun, or not traced
        if self._issued is not None:
            self._issued.ends_later()

    def wait(self) -> None:
        if self._read is not None:
            self._begin_to_read()
            self._read()
            self.release()

    def _begin_to_read(self) -> None:
        # The calling thread reads what others have published. A trace counts this as a wait.
        if self._issued is not None and not self._began_to_read:
            self._began_to_read = time.monotonic()

    def poll(self) -> bool:
        if self._read is not None and not self._channel.is_published(self._message):
            return False
        self.wait()
        return True

    def release(self) -> None:
        if self._read is not None:
            self._read = None
            self._channel.acknowledge(self._message)
            if self._issued is not None:
                self._issued.end()
                if self._began_to_read:
                    self._issued.waited(self._began_to_read, time.monotonic())

    abandon = release  # without a wait, because no other rank writes to this rank's memory

    def __del__(self) -> None:
        # If the collective was dropped unfinished, as when the model is deleted, this tells other
        # ranks not to wait for this one. But a forked process, which has a copy of this object,
        # must not acknowledge in the name of the rank.
        if self._channel.process == os.getpid():
            self.release()


class _Views(_Receiving):
    """An all-gather whose rows are views of the memory of the other ranks, until ``release``."""

    def __init__(self, channel: Channel, message: int, source: torch.Tensor) -> None:
        self._receive = functools.partial(channel.receive_all, message, source)
        super().__init__(channel, message, self._receive)

    def rows(self) -> Rows:
        self._begin_to_read()
        return [row.view(1, -1) for row in self._receive()]


def _is_candidate(group: dist.ProcessGroup) -> bool:
    # Not dist.get_backend, which is "undefined" if the group was made without naming a backend.
    return group.size() > 1 and backend_name(group, torch.device("cpu")) == "gloo"


class SharedMemoryCommunicator(WorkCommunicator):
    """Collectives through shared memory in groups whose ranks can share it, else through sockets.

    At the first collective of a group, its ranks find out whether they can share memory. If one of
    them had ``MESHARD_SHARED_MEMORY=0`` when its communicator was made, the group uses sockets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_wanted = os.environ.get(_VARIABLE, "1") != "0"
        # None if the group uses sockets. Copies of this communicator share the dict.
        self._channels: dict[dist.ProcessGroup, Channel | None] = {}

    def _channel(self, group: dist.ProcessGroup) -> Channel | None:
        """Return the channel of ``group``. **Collective:** the first call for each group."""
        if group not in self._channels:
            is_possible = _is_candidate(group)
            channel = open_channel(group, is_wanted=self._is_wanted) if is_possible else None
            self._channels[group] = channel
        return self._channels[group]

    def _name(self, op: str, label: str, group: dist.ProcessGroup) -> Name:
        return op, label, self.root_names.get(group, "no root")

    def _channel_before(self, group: dist.ProcessGroup) -> Channel | None:
        """Return the channel of ``group``, to allocate memory for a later collective.

        Returns None if the user has set a collective, or memory for it (``CommSettings``). Under
        ``MESHARD_DEBUG=1`` it opens no channel: opening is itself a collective, and the check that
        the ranks agree comes later, with the collective that uses the memory.
        """
        if self._custom is not None:
            return None
        return self._channels.get(group) if self.is_checked else self._channel(group)

    def memory_report(self, groups: Iterable[dist.ProcessGroup]) -> str:
        candidates = [group for group in dict.fromkeys(groups) if _is_candidate(group)]
        if not candidates:
            return ""
        if WHY_UNSUPPORTED or not self._is_wanted:
            return f"shared memory: off: {WHY_UNSUPPORTED or f'{_VARIABLE}=0'}"
        if any(group not in self._channels for group in candidates):
            return "shared memory: not known before the first step"
        num_open = sum(self._channels[group] is not None for group in candidates)
        if num_open == len(candidates):
            return "shared memory: on"
        where = f" in {len(candidates) - num_open} of {len(candidates)} groups" if num_open else ""
        return (
            f"shared memory: off{where}: the ranks are on several hosts, one may not open the "
            f"memory of another, or one has set {_VARIABLE}=0"
        )

    def allocate_source(
        self, numel: int, dtype: torch.dtype, *, device: torch.device, group: dist.ProcessGroup
    ) -> torch.Tensor:
        channel = self._channel_before(group)
        if channel is None:
            return super().allocate_source(numel, dtype, device=device, group=group)
        return channel.allocate(numel, dtype)

    def send_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        as_one: bool = False,
    ) -> Rows:
        channel = None if as_one else self._channel_before(group)
        if channel is None:
            return super().send_rows(numel, dtype, device=device, group=group, as_one=as_one)
        return channel.allocate_rows(numel, dtype)

    def begin_phase(self, phase: StepPhase, *, is_tight: bool = False) -> None:
        for channel in self._channels.values():
            if channel is not None:
                channel.release_cached_memory(phase, is_tight=is_tight)

    def _start_gather(
        self, source: torch.Tensor, group: dist.ProcessGroup, label: str, receive: Receive | None
    ) -> GatherInFlight | None:
        channel = self._channel(group)
        if channel is None:
            return super()._start_gather(source, group, label, receive)
        name = self._name("all_gather", label, group)
        return _Views(channel, channel.publish(source, name), source)

    def _start_reduce_scatter(
        self,
        output: torch.Tensor,
        rows: Rows,
        group: dist.ProcessGroup,
        label: str,
        *,
        keep_signs: bool,
    ) -> InFlight:
        channel = self._channel(group)
        if channel is None:
            return super()._start_reduce_scatter(output, rows, group, label, keep_signs=keep_signs)
        name = self._name("reduce_scatter", label, group)
        source = [row for block in rows for row in block.unbind()]
        message, own = channel.publish_rows(source, name), source[channel.rank]

        def add_up() -> None:
            received = channel.receive_all(message, own, is_row=True)
            if len(received) == 2:
                cpu.sum_two(output, received[1 - channel.rank], own)
            else:
                cpu.sum_rows(output, torch.stack(received), keep_signs=keep_signs)

        return _Receiving(channel, message, add_up)

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        channel = self._channel(group) if group.size() == 2 else None
        if channel is None:
            return super()._start_all_reduce(buffer, group, label)
        # A copy is published, because the sum would overwrite what the other rank reads.
        name = self._name("all_reduce", label, group)
        message, other = channel.publish(buffer, name, copy=True), 1 - channel.rank

        def add() -> None:
            buffer.add_(channel.receive(message, other, buffer.numel(), buffer.dtype))

        return _Receiving(channel, message, add)
