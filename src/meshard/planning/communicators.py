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
from meshard.planning.device import Streams
from meshard.planning.memory import MemoryLog


class _Labelling(Communicator):
    """Tells the log what the memory of a communicator is for: the next base of a class."""

    def __init__(self, log: MemoryLog, *args: Any) -> None:
        super().__init__(*args)
        self._log = log

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
        super().__init__(log, Streams())


class PlannedWorks(_Labelling, WorkCommunicator):
    """On a CPU, as through sockets."""

    def _start_all_gather(
        self, memory: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        received = torch.empty_like(memory)  # gloo receives into a buffer of its own
        work = start_all_gather_on(group, memory.view(-1), source)
        return WorkHandle(work, memory, ("all_gather", label), group, [source, received])
