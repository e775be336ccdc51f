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


class _Stream:
    """A stream on which everything is done at once, and any event on it."""

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def wait_event(self, event: _Stream) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Streams:
    """Stands in for ``torch.cuda``."""

    def __init__(self) -> None:
        self._current = _Stream()

    def Stream(self, priority: int = 0) -> _Stream:
        return _Stream()

    def current_stream(self) -> _Stream:
        return self._current

    def set_stream(self, stream: _Stream) -> None:
        self._current = stream


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

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(_Streams())
        self._log = log


class PlannedWorks(_Labelling, WorkCommunicator):
    """On a CPU, as through sockets."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__()
        self._log = log

    def _start_all_gather(
        self, memory: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        received = torch.empty_like(memory)  # gloo receives into a buffer of its own
        work = start_all_gather_on(group, memory.view(-1), source)
        return WorkHandle(work, memory, ("all_gather", label), group, [source, received])
