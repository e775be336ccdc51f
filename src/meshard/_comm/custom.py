"""Collectives and memory brought by the user.

What is issued is still checked, counted and waited for like any other collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshard._comm.communicator import (
    BaseCommunicator,
    CommStream,
    Communicator,
    InFlight,
    RecordedWork,
    Rows,
    StepPhase,
    profiled,
)
from meshard._comm.cpu import WorkInFlight
from meshard._comm.divergence import CheckedCommunicator
from meshard._torch.private import backend_of


class Collective(Protocol):
    """A collective, with the memory for it: see ``meshard.AllGather``."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        """Start it."""


class GroupMemory:
    """Memory from the process group itself, which it may send without a copy.

    Args:
        device: Where the collectives run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def of(self, group: dist.ProcessGroup) -> Any:
        """Return the group's backend.

        Raises:
            RuntimeError: It has no memory to give.
        """
        # There is no public name for what NCCL allocates for zero-copy transfers.
        backend = backend_of(group, self._device)
        if not backend.supports_tensor_alloc(self._device):
            raise RuntimeError(
                f"the backend {backend.name()!r} cannot allocate memory on {self._device}; "
                "leave set_allocate_memory_from_process_group_for_comm out."
            )
        return backend

    def allocate(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor ``[numel]``."""
        tensor: torch.Tensor = self.of(group).allocate_tensor(
            numel, dtype=dtype, device=self._device
        )
        return tensor


class CustomCommunicator(BaseCommunicator):
    """A communicator with some of its collectives, or their memory, replaced.

    Args:
        inner: Does what is not replaced; its lanes are used.
        all_gather: Instead of the inner one's.
        reduce_scatter: Instead of the inner one's.
        memory: Where buffers come from, if no collective is replaced.
    """

    def __init__(
        self,
        inner: Communicator,
        *,
        all_gather: Collective | None = None,
        reduce_scatter: Collective | None = None,
        memory: GroupMemory | None = None,
    ) -> None:
        self._inner = inner
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        self._memory = memory
        self.waits_block_host = inner.waits_block_host

    @property
    def identity(self) -> object:
        """See ``Communicator.identity``."""
        return self._inner.identity

    def on_stream(self, comm_stream: CommStream) -> contextlib.AbstractContextManager[None]:
        """See ``Communicator.on_stream``."""
        return self._inner.on_stream(comm_stream)

    def record(self, *keep: torch.Tensor) -> RecordedWork:
        """See ``Communicator.record``."""
        return self._inner.record(*keep)

    def gather_after(self, event: Any) -> None:
        """See ``Communicator.gather_after``."""
        self._inner.gather_after(event)

    def enter_after(self, comm_stream: CommStream, pending: InFlight) -> None:
        """See ``Communicator.enter_after``."""
        self._inner.enter_after(comm_stream, pending)

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Communicator.hold_until_done``."""
        self._inner.hold_until_done(tensors)

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
        """See ``Communicator.allocate``."""
        if is_sent:  # the user allocates what is received, and reduce-scattered
            return super().allocate(numel, comm_stream, dtype=dtype, device=device, group=group)
        custom = {
            CommStream.GATHER: self._all_gather,
            CommStream.SCATTER: self._reduce_scatter,
        }.get(comm_stream)
        if custom is not None and group.size() > 1:
            return custom.allocate((numel,), dtype=dtype, device=device)
        if self._memory is not None and group.size() > 1:
            return self._memory.allocate(group, numel, dtype)
        return self._inner.allocate(numel, comm_stream, dtype=dtype, device=device, group=group)

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """See ``Communicator.release_cached_memory``."""
        self._inner.release_cached_memory(keep_for=keep_for)

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        """See ``Communicator.all_gather``."""
        if self._all_gather is None or group.size() == 1:
            return self._inner.all_gather(output, source, group=group, label=label)
        self._announce("all_gather", output, group, label)
        with profiled("all_gather", label):
            work = self._all_gather(output, source, group, self.waits_block_host)
        return self._pending(work, output, source)

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
        if self._reduce_scatter is None or group.size() == 1:
            return self._inner.reduce_scatter(
                output, source, group=group, label=label, keep_signs=keep_signs
            )
        assert isinstance(source, torch.Tensor)
        self._announce("reduce_scatter", source, group, label)
        narrow = output
        if output.dtype != source.dtype:
            narrow = self.allocate(
                output.numel(),
                CommStream.SCATTER,
                dtype=source.dtype,
                device=source.device,
                group=group,
            )
        sum_op = dist.ReduceOp.SUM
        with profiled("reduce_scatter", label):
            work = self._reduce_scatter(
                narrow, source.view(-1), group, sum_op, self.waits_block_host
            )
        return self._pending(work, output, source, widen=None if narrow is output else narrow)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        output: torch.Tensor | None = None,
    ) -> InFlight:
        """See ``Communicator.all_reduce``."""
        return self._inner.all_reduce(buffer, group=group, label=label, output=output)

    def _announce(
        self, op: str, payload: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> None:
        if isinstance(self._inner, CheckedCommunicator):
            self._inner.check(op, label, payload, group)
        self.observe(op, payload, group, label)

    def _pending(
        self,
        work: dist.Work | None,
        output: torch.Tensor,
        source: torch.Tensor,
        widen: torch.Tensor | None = None,
    ) -> InFlight:
        if self.waits_block_host:
            return WorkInFlight(work, None if widen is None else lambda: output.copy_(widen))
        if work is not None:
            work.wait()  # the lane's stream waits, not the host
        if widen is not None:
            output.copy_(widen)
            return self.record(source, widen)
        return self.record(source)
