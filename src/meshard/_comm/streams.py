"""Collectives on a device with streams.

Note: Stream rules.
    The *compute* stream is the one that is current when a comm stream is entered or ``wait`` is
    called. These rules order every read after its write, and every reuse of memory after its last
    use. So ``record_stream`` is not needed. (It delays reuse until the allocator polls an event.)

    1. *A comm stream waits for compute when it is entered.* So it sees what compute wrote (shards,
       gradients). And it never allocates memory that compute still reads: if a block was freed
       before the entry, compute has queued its last use of the block before the entry too.
    2. *``wait`` makes compute wait for the comm stream* up to the end of the collective or local
       work in question, and not for work queued later. One comm stream waits for another only if
       ``wait`` is called while the first one is current.
    3. *Memory goes back to the stream that allocated it.* A tensor allocated on compute and used on
       a comm stream (the input of a reduce-scatter) is dropped only after compute has waited for
       that stream. A tensor allocated on a comm stream and used on compute (gathered shards,
       reduced gradients) may be dropped at any time while compute is current, by rule 1.
    4. *A tensor that one comm stream allocated and another uses lives until compute has waited for
       both streams*: until ``Reduction.finish``, or until the wait for a copy to the host.
    5. *Memory that the optimizer stream used is held until the device is done with it* (see
       ``hold_until_done``). The optimizer stream reads gradients that other comm streams allocated,
       and perhaps no stream waits for the optimizer stream before the next gather.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommStream, Communicator, Handle, ranged
from meshard._comm.stalls import Collective, watch_event
from meshard._torch.private import all_gather_single, is_profiling, reduce_scatter_single


class EventHandle:
    """Work queued on a comm stream. ``wait`` makes a stream, not the host, wait for its event."""

    __slots__ = (
        "_comm_streams", "_compute", "_device_module", "_keep", "collective", "event", "result"
    )  # fmt: skip

    def __init__(
        self, comm: StreamCommunicator, event: Any, keep: tuple[torch.Tensor, ...], compute: Any
    ) -> None:
        self.result: torch.Tensor
        self._device_module = comm._device_module
        self._comm_streams = comm._streams
        self.event = event
        self._keep = keep  # dropped by the first wait
        self._compute = compute  # the stream from which the comm stream was entered
        self.collective: Collective | None = None  # for which a wait is, for a profiler

    def wait(self) -> None:
        stream = self._device_module.current_stream()
        collective = self.collective
        if collective is None or not is_profiling() or stream in self._comm_streams.values():
            self._order(stream)
            return
        with ranged("wait", *collective):  # of compute
            self._order(stream)

    def release(self) -> None:
        if self._keep:
            self.wait()

    def _order(self, stream: Any) -> None:
        stream.wait_event(self.event)
        self._keep = ()

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()
        self._keep = ()

    def __del__(self) -> None:
        if self._keep:
            # The caller has dropped this handle without a wait, for example by deleting the model.
            # By rule 3 the stream from which the comm stream was entered, ``_compute``, must still
            # wait. The current stream may be another one, which captures a graph while the garbage
            # collector calls this: a wait there would invalidate the capture.
            self._order(self._compute)


class StreamCommunicator(Communicator):
    """Collectives on a device with streams and events, one stream per ``CommStream``.

    ``device_module`` is ``torch.cuda``, or a module like it.
    """

    waits_block_host = False

    def __init__(self, device_module: Any) -> None:
        super().__init__()
        self._device_module = device_module
        # Copies (``with_custom``, ``shared_with``) are shallow: they share the containers and
        # objects below. They may share the event ``_entry`` too, which can be recorded again (see
        # ``on_stream``). Each copy sets its own ``_compute``.
        self._streams: dict[CommStream, Any] = {}
        self._gather_after: list[Any] = []  # at most one event
        self._entry: Any = None  # the event of the last entry into a comm stream, to be reused
        self._compute: Any = None  # inside on_stream: the stream that was current before
        self._after: dict[CommStream, list[Handle]] = {}
        self._held_until_done: deque[tuple[Any, Sequence[torch.Tensor]]] = deque()
        self._is_capturing = getattr(device_module, "is_current_stream_capturing", bool)

    @contextlib.contextmanager
    def on_stream(self, comm_stream: CommStream) -> Iterator[None]:
        # Every unit enters several streams in a step, so entering does as little as possible.
        module = self._device_module
        stream = self._streams.get(comm_stream)
        if stream is None:
            # High priority: if compute delays a collective on one rank, all ranks wait for it.
            stream = self._streams[comm_stream] = module.Stream(priority=-1)
        compute = module.current_stream()
        if comm_stream is CommStream.GATHER and self._gather_after:
            event = self._gather_after.pop()
        else:
            # The event can be reused: recording it again does not affect earlier wait_event calls.
            event = self._entry = compute.record_event(self._entry)
        stream.wait_event(event)
        self._drop_what_is_done()
        module.set_stream(stream)
        before, self._compute = self._compute, compute
        try:
            for handle in self._after.pop(comm_stream, ()):
                handle.wait()
            yield
        finally:
            self._compute = before
            module.set_stream(compute)

    def gather_after(self, event: Any) -> None:
        """Let the next gather wait for ``event`` instead of compute, as an exception to rule 1.

        The event must be recorded after the last backward. The reason is that compute reads what
        this backward gathered, and the allocator may give the same memory to the next gather.
        """
        self._gather_after[:] = [event]

    def enter_after(self, comm_stream: CommStream, handle: Handle) -> None:
        self._after.setdefault(comm_stream, []).append(handle)

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            event = self._device_module.current_stream().record_event()
            self._held_until_done.append((event, tensors))

    def _drop_what_is_done(self) -> None:
        """Drop tensors that ``hold_until_done`` keeps, if the work on them is done."""
        if self._held_until_done and self._is_capturing():
            # A query would invalidate the capture, which has begun by waiting for the device.
            self._held_until_done.clear()
        while self._held_until_done and self._held_until_done[0][0].query():
            self._held_until_done.popleft()

    def record(self, *keep: torch.Tensor, after: Handle | None = None) -> EventHandle:
        stream = self._device_module.current_stream()
        compute = stream if self._compute is None else self._compute
        recorded = EventHandle(self, stream.record_event(), keep, compute)
        if isinstance(after, EventHandle):
            recorded.collective = after.collective
        return recorded

    def _start_all_gather(
        self, memory: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        all_gather_single(memory.view(-1), source, group=group)
        return self._handle(None, memory, ("all_gather", label), group, source)

    def _start_reduce_scatter(
        self, rows: torch.Tensor, sum_dtype: torch.dtype, group: dist.ProcessGroup, label: str
    ) -> Handle:
        received = self._allocate((rows.size(1),), rows.dtype, rows.device, group, None)
        reduce_scatter_single(received, rows.view(-1), group=group)
        total = received.to(sum_dtype)
        return self._handle(None, total, ("reduce_scatter", label), group, rows)

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        dist.all_reduce(buffer, group=group)
        return self._handle(None, buffer, ("all_reduce", label), group)

    def _local(self, result: torch.Tensor) -> Handle:
        recorded = self.record(result)
        recorded.result = result
        return recorded

    def _handle(
        self,
        work: dist.Work | None,
        result: torch.Tensor,
        collective: Collective,
        group: dist.ProcessGroup,
        *keep: torch.Tensor,
        then: Callable[[], object] | None = None,
    ) -> Handle:
        if work is not None:
            work.wait()  # the current stream waits, not the host
        if then is not None:
            then()
        recorded = self.record(result, *keep)
        recorded.result = result
        recorded.collective = collective
        watch_event(recorded.event, collective, owner=self, device_module=self._device_module)
        return recorded
