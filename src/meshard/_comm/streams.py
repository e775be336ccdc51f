"""Collectives on a device with streams.

Note: Stream rules.
    The *compute* stream is the one that is current when a lane is entered or a ``wait`` is called.
    Each lane has a stream of its own. These rules make every read come after its write, and every
    reuse of memory after its last use, without ``record_stream`` (which would keep blocks from
    being reused until the allocator polls an event):

    1. *Entering a lane waits for compute.* An event recorded on compute at entry comes before
       everything that the lane does. So a lane sees what compute wrote (shards, gradients), and
       memory that a lane allocates cannot be memory that compute still reads: a block that was
       freed before the entry was last used before it.
    2. *Waiting makes compute wait for the lane.* ``InFlight.wait`` makes the current stream wait
       for an event recorded right after the collective was queued (again after local work, by
       ``mark``).
    3. *Memory goes back to the stream that allocated it.* A tensor allocated on compute and used
       on a lane (a reduce-scatter's input) is dropped only after compute has waited for that
       lane. A tensor allocated on a lane and used on compute (gathered shards, reduced gradients)
       may be dropped at any time outside the lane, by rule 1.
    4. *What one lane allocated and another uses lives until ``finish``*, when compute has waited
       for both.
    5. *Nothing waits twice for the same thing, and no host thread waits at all.* Lanes do not
       wait for one another except through ``InFlight.wait`` inside the later lane.
    6. *What an optimizer has used, others get when it is through.* Its lane reads gradients that
       other lanes have allocated, and nothing waits for it before the next gather. So they are
       *retired*: held until the device has got there, which is asked whenever a lane is entered.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.communicator import (
    DONE,
    BaseCommunicator,
    CommStream,
    InFlight,
    RecordedWork,
    Rows,
    StepPhase,
    profiled,
)
from meshard._torch.versions import all_gather_single, reduce_scatter_single


class _EventInFlight:
    """A collective queued on a lane, as the event that follows it."""

    __slots__ = ("_device_module", "_event", "_keep")

    def __init__(self, device_module: Any, event: Any, keep: tuple[torch.Tensor, ...]) -> None:
        self._device_module = device_module
        self._event = event
        self._keep = keep  # rule 3: what the lane reads lives until compute has waited

    def wait(self) -> None:
        """Make the current stream wait for the collective; the host goes on."""
        self._device_module.current_stream().wait_event(self._event)
        self._keep = ()

    def poll(self) -> bool:
        """Return that it may not be: to order streams costs no host time, but is not over."""
        return False

    def synchronize(self) -> None:
        """Block the host until the device has got there: what it launches next is ordered too."""
        self._event.synchronize()
        self._keep = ()

    def __del__(self) -> None:
        if self._keep:
            self.wait()  # dropped with the model, say: rule 3 holds all the same


class StreamCommunicator(BaseCommunicator):
    """Collectives on a device with streams and events, one stream per lane.

    Args:
        device_module: ``torch.cuda``, or a module with its ``Stream``, ``Event``, ``stream`` and
            ``current_stream``.
    """

    waits_block_host = False

    def __init__(self, device_module: Any) -> None:
        self._device_module = device_module
        self._streams: dict[CommStream, Any] = {}
        self._gather_after: Any = None
        self._after: dict[CommStream, list[InFlight]] = {}
        self._held_until_done: deque[tuple[Any, Sequence[torch.Tensor]]] = deque()

    @contextlib.contextmanager
    def _enter(self, comm_stream: CommStream) -> Iterator[None]:
        stream = self._streams.get(comm_stream)
        if stream is None:
            # High priority: a collective held up by compute holds up every other rank.
            stream = self._streams[comm_stream] = self._device_module.Stream(priority=-1)
        if comm_stream is CommStream.GATHER and self._gather_after is not None:
            event, self._gather_after = self._gather_after, None
        else:
            event = self._device_module.current_stream().record_event()
        stream.wait_event(event)
        if self._held_until_done:
            self._collect()
        with self._device_module.stream(stream):
            if self._after:
                for pending in self._after.pop(comm_stream, ()):
                    pending.wait()
            yield

    def on_stream(self, comm_stream: CommStream) -> contextlib.AbstractContextManager[None]:
        """See ``Communicator.on_stream`` and rule 1."""
        return self._enter(comm_stream)

    def gather_after(self, event: Any) -> None:
        """See ``Communicator.gather_after``; the exception to rule 1.

        The event must come after the last backward: what that gathered is read on compute, and the
        lane may get its memory again.
        """
        self._gather_after = event

    def enter_after(self, comm_stream: CommStream, pending: InFlight) -> None:
        """See ``Communicator.enter_after``."""
        self._after.setdefault(comm_stream, []).append(pending)

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Communicator.hold_until_done`` and rule 6."""
        if tensors:
            event = self._device_module.current_stream().record_event()
            self._held_until_done.append((event, tensors))

    def _collect(self) -> None:
        while self._held_until_done and self._held_until_done[0][0].query():
            self._held_until_done.popleft()

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """See ``Communicator.release_cached_memory``: what is retired, if it is over."""
        self._collect()

    def record(self, *keep: torch.Tensor) -> RecordedWork:
        """See ``Communicator.record`` and rule 2."""
        event = self._device_module.current_stream().record_event()
        return _EventInFlight(self._device_module, event, keep)

    def all_gather(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
    ) -> InFlight:
        """See ``Communicator.all_gather``."""
        if group.size() == 1:
            output.copy_(source)
            return self.record(source)
        self.observe("all_gather", output, group, label)
        with profiled("all_gather", label):
            all_gather_single(output, source, group=group)
        return self.record(source)

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
        assert isinstance(source, torch.Tensor)
        if group.size() == 1:
            output.copy_(source.view(-1))
            return self.record(source)
        self.observe("reduce_scatter", source, group, label)
        with profiled("reduce_scatter", label):
            if output.dtype == source.dtype:
                reduce_scatter_single(output, source.view(-1), group=group)
                return self.record(source)
            narrow = torch.empty_like(output, dtype=source.dtype)
            reduce_scatter_single(narrow, source.view(-1), group=group)
            output.copy_(narrow)
            return self.record(source, narrow)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        output: torch.Tensor | None = None,
    ) -> InFlight:
        """See ``Communicator.all_reduce``."""
        if group.size() == 1:
            return DONE
        self.observe("all_reduce", buffer, group, label)
        with profiled("all_reduce", label):
            dist.all_reduce(buffer, group=group)
        return self.record(buffer)
