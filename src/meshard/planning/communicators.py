"""The communicators of a planned rank: they send nothing, and tell what they would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommStream, Communicator, Handle
from meshard._comm.cpu import WorkCommunicator, WorkHandle
from meshard._comm.streams import StreamCommunicator
from meshard._torch.private import start_all_gather_on
from meshard.planning.memory import MemoryLog
from meshard.planning.tape import Tape


class _Event:
    """A moment on a stream that does not exist."""

    def __init__(self, number: int) -> None:
        self.number = number

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A stream on which everything is done at once, and what was queued is on a tape."""

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape, self.number = tape, number

    def record_event(self, event: Any = None) -> _Event:
        return _Event(self.tape.record(stream=self.number))

    def wait_event(self, event: _Event) -> None:
        self.tape.wait(event.number, stream=self.number)

    def wait_stream(self, stream: _Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None: ...


class _Streams:
    """Stands in for ``torch.cuda``."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._current = _Stream(tape, 0)

    def Stream(self, priority: int = 0) -> _Stream:
        return _Stream(self._tape, self._tape.new_stream())

    def Event(self, enable_timing: bool = False) -> None:
        """Return nothing: a stream makes an event when it records one."""

    def current_stream(self) -> _Stream:
        return self._current

    def set_stream(self, stream: _Stream) -> None:
        self._current, self._tape.stream = stream, stream.number


class _Labelling(Communicator):
    """Tells the log what the memory of a communicator is for: the next base of a class."""

    _log: MemoryLog

    @contextlib.contextmanager
    def on_stream(self, comm_stream: CommStream) -> Iterator[None]:
        kind = "optimizer" if comm_stream is CommStream.OPTIMIZER else "communication"
        with super().on_stream(comm_stream), self._log.making(kind):
            yield

    def gather_memory(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._log.making("communication"):
            return super().gather_memory(*args, **kwargs)

    def send_memory(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._log.making("communication"):
            return super().send_memory(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Handle:
        with self._log.making("communication", unit=kwargs["label"]):
            return super().all_gather(*args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Handle:
        with self._log.making("communication", unit=kwargs["label"]):
            handle = super().reduce_scatter(*args, **kwargs)
        self._log.relabel([handle.result], "grads")
        return handle

    def all_to_all(self, *args: Any, **kwargs: Any) -> Handle:
        with self._log.making("communication"):
            return super().all_to_all(*args, **kwargs)


class PlannedStreams(_Labelling, StreamCommunicator):
    """On a device with streams."""

    def __init__(self, log: MemoryLog, tape: Tape) -> None:
        super().__init__(_Streams(tape))
        self._log = log


class _Wired:
    """A collective of a rank without streams, for which the host waits."""

    def __init__(self, handle: Handle, tape: Tape) -> None:
        self._handle, self._tape = handle, tape
        self._event: int | None = tape.sent
        self.result = handle.result

    def wait(self) -> None:
        if self._event is not None:
            self._tape.wait(self._event)
            self._event = None
        self._handle.wait()

    synchronize = wait

    def done(self) -> bool:
        return self._event is None

    def release(self) -> None:
        self._handle.release()


class PlannedWorks(_Labelling, WorkCommunicator):
    """On a CPU, as through sockets."""

    def __init__(self, log: MemoryLog, tape: Tape) -> None:
        super().__init__()
        self._log, self._tape = log, tape

    def _start_all_gather(
        self, memory: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        received = torch.empty_like(memory)  # gloo receives into a buffer of its own
        work = start_all_gather_on(group, memory.view(-1), source)
        keep = [source, received]
        return _Wired(WorkHandle(work, memory, ("all_gather", label), group, keep), self._tape)

    def _start_reduce_scatter(self, *args: Any, **kwargs: Any) -> Handle:
        return _Wired(super()._start_reduce_scatter(*args, **kwargs), self._tape)

    def _start_all_reduce(self, *args: Any, **kwargs: Any) -> Handle:
        return _Wired(super()._start_all_reduce(*args, **kwargs), self._tape)

    def _handle(self, *args: Any, **kwargs: Any) -> Handle:
        return _Wired(super()._handle(*args, **kwargs), self._tape)
