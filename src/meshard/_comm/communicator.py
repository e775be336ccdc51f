"""The communicator: starts collectives and orders their results.

A collective is started by one call and finished by ``wait()`` on what that call returns; in between
it runs beside the compute. The implementations are ``WorkCommunicator`` for CPU tensors, its
extension for ranks of one host, and ``StreamCommunicator`` for devices with streams. Other
collectives of the package, which block, are in ``blocking``.

Every collective is *announced* before it is issued: to the check of ``MESHARD_DEBUG=1``, which
raises where the ranks differ, and to the observers, such as ``CommLedger``.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshard._comm.custom import CommSettings, memory_backend
from meshard._comm.divergence import check_fingerprint, is_debugging, number_root
from meshard._torch.private import is_profiling
from meshard.policies import Comm


class StepPhase(enum.Enum):
    """What a communicator may keep memory for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # of an optimizer


# One tensor [ranks, n], or a list of tensors [n].
Rows = torch.Tensor | list[torch.Tensor]


class CommStream(enum.Enum):
    """A queue on which communication, and the local work around it, runs in order."""

    GATHER = "gather"
    SCATTER = "scatter"
    ALL_REDUCE = "all_reduce"
    HOST = "host"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective, as issued by one rank.

    ``payload_bytes`` is the size of the larger buffer: the output of an all-gather, the input of a
    reduce-scatter or an all-reduce.
    """

    op: str
    unit: str
    group_size: int
    payload_bytes: int
    dtype: torch.dtype

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends with a ring algorithm (Patarasuk and Yuan, 2009)."""
        passes = 2 if self.op == "all_reduce" else 1
        return passes * self.payload_bytes * (self.group_size - 1) // self.group_size


class InFlight(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Order what the caller does next after the collective. May be called again."""

    def poll(self) -> bool:
        """Do what ``wait`` does, if the host need not block for it. Return whether it is done."""


class GatheredViews(InFlight, Protocol):
    """An all-gather whose rows are read where the other ranks keep them."""

    def rows(self) -> list[torch.Tensor]:
        """Wait for the rows, and return them in rank order. They must not be written to."""

    def release(self) -> None:
        """Let the other ranks reuse the memory of the rows, which must not be read any more."""


class RecordedWork(InFlight, Protocol):
    """Local work that has been queued."""

    def synchronize(self) -> None:
        """Block the host until the work is done. May be called repeatedly."""


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None: ...

    def poll(self) -> bool:
        return True

    def synchronize(self) -> None: ...


DONE = Done()

Observer = Callable[[CommEvent, object], None]
_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Call ``observer(event, identity of the communicator)`` before every collective."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Undo ``add_observer``."""
    _observers.remove(observer)


def announce(
    op: str, payload: torch.Tensor, group: dist.ProcessGroup, label: str, *, rows: int = 1
) -> None:
    """Check that the ranks agree, then call the observers: a collective is about to be issued.

    For collectives outside of a communicator.

    Args:
        op: Name of the collective.
        payload: Its larger buffer, or one of ``rows`` rows of it.
        group: The ranks that take part.
        label: Name of the unit, or of what the collective is for.
        rows: Number of rows.

    Raises:
        RuntimeError: Under ``MESHARD_DEBUG=1``, if the ranks are about to issue different
            collectives.
    """
    event = _event(op, payload, group, label, rows)
    if is_debugging():
        _check(event, group)
    for observer in tuple(_observers):
        observer(event, None)


def _event(
    op: str, payload: torch.Tensor, group: dist.ProcessGroup, label: str, rows: int
) -> CommEvent:
    num_bytes = rows * payload.numel() * payload.itemsize
    return CommEvent(op, label, group.size(), num_bytes, payload.dtype)


def _check(event: CommEvent, group: dist.ProcessGroup, root: int | None = None) -> None:
    of_root = "" if root is None else f"root {root}, "
    numel = event.payload_bytes // event.dtype.itemsize
    check_fingerprint(
        f"{event.op} of unit {event.unit!r} ({of_root}{numel} x {event.dtype})", group
    )


class Communicator:
    """Collectives on the tensors of one device, for one root.

    Groups of one rank issue nothing; the data is copied. ``label`` is the name of the unit, for
    observers, errors and the profiler. ``MESHARD_DEBUG`` is read when the communicator is made.

    Attributes:
        waits_block_host: Whether ``InFlight.wait`` blocks the calling thread (and not a stream).
        may_keep_buffers: Whether the caller may keep and resize the buffers of its collectives,
            because only the host uses them.
        identity: What observers are given to tell communicators apart. Communicators that share
            streams and memory have the same.
    """

    waits_block_host: bool
    may_keep_buffers = False

    def __init__(self) -> None:
        self.identity = object()
        self._custom = CommSettings()
        self._is_custom = False
        # None: not checked. Else the number of the root by group.
        self._root_numbers: dict[dist.ProcessGroup, int] | None = {} if is_debugging() else None

    # --- variants that share streams and memory --------------------------------------------

    def with_custom(self, custom: CommSettings) -> Communicator:
        """Return a communicator on the same streams that uses the collectives of the user."""
        if not custom:
            return self
        variant = copy.copy(self)
        variant._custom, variant._is_custom = custom, True
        variant.may_keep_buffers = False
        return variant

    def number_root(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Give the root that uses this communicator a number, if collectives are checked.

        Args:
            groups: All groups in which the root communicates.
        """
        if self._root_numbers is not None:
            self._root_numbers = number_root(groups)

    def shared_with(self, own: Communicator) -> Communicator:
        """Return this communicator for another root, which has used ``own``.

        Where collectives are checked, the root keeps its number.
        """
        if own._root_numbers is None:
            return self
        variant = copy.copy(self)
        variant._root_numbers = own._root_numbers
        return variant

    # --- streams ---------------------------------------------------------------------------

    def on_stream(self, comm_stream: CommStream) -> contextlib.AbstractContextManager[None]:
        """Queue what is inside on ``comm_stream``, after all that the caller has queued so far."""
        raise NotImplementedError

    def record(self, *keep: torch.Tensor) -> RecordedWork:
        """Return a wait for what is queued on the current stream; ``keep`` lives until it."""
        raise NotImplementedError

    def gather_after(self, event: Any) -> None:
        """Order the next use of the gather stream after ``event`` instead of after the caller."""

    def enter_after(self, comm_stream: CommStream, pending: InFlight) -> None:
        """Order the next use of ``comm_stream`` after ``pending`` too."""
        pending.wait()

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep ``tensors`` alive until what is queued on the current stream is done. No wait.

        For memory of another stream that this one uses last.
        """

    # --- memory ----------------------------------------------------------------------------

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
        """Return ``[numel]``, uninitialised, for a collective of ``group`` on ``comm_stream``.

        With ``is_sent`` it will be the whole source of one collective, then dropped.
        """
        # The user's allocators serve what is received, and what is reduce-scattered.
        if self._is_custom and not is_sent and group.size() > 1:
            if self._custom.from_group:
                backend = memory_backend(group, device)
                tensor: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
                return tensor
            custom: Comm | None = None
            if comm_stream is CommStream.GATHER:
                custom = self._custom.all_gather
            elif comm_stream is CommStream.SCATTER:
                custom = self._custom.reduce_scatter
            if custom is not None:
                return custom.allocate((numel,), dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device=device)

    def allocate_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """Return the rows ``[numel]`` to pass to ``reduce_scatter``; None: pass one tensor.

        The other ranks read their rows in place. The row of this rank is ``own`` if that is given,
        else ordinary memory; it may be the ``output``.
        """
        return None

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """Free memory that is kept for later collectives, as a phase of the step begins.

        Args:
            keep_for: Keep what this phase has needed in the last steps; None: free everything.
        """

    def sums_apart(self, group: dist.ProcessGroup) -> bool:
        """Whether ``all_reduce`` should write its sum to a separate ``output``.

        In place it would cost another copy. Its input is memory of ``allocate(is_sent=True)``.
        """
        return False

    def memory_report(self, groups: Iterable[dist.ProcessGroup]) -> str:
        """Return a line on how ranks of one host exchange data in ``groups``, for ``describe``."""
        return ""

    # --- collectives -----------------------------------------------------------------------

    def gather_views(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> GatheredViews | None:
        """Gather every rank's ``source [n]`` without moving it; None: use ``all_gather``.

        Collective and stream as for ``all_gather``. **Lifetime:** ``source`` must not be edited
        until the rows are released.
        """
        return None

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        """Fill ``output [ranks * n]`` with every rank's ``source [n]``, in rank order.

        **Collective:** all ranks of ``group``. **Stream:** the stream of the caller.
        **Lifetime:** both tensors must live until ``wait`` has returned.
        """
        if group.size() == 1:
            output.copy_(source)
            return self.record(source)
        self._announce("all_gather", output, group, label)
        with profiled("all_gather", label):
            custom = self._custom.all_gather
            if custom is None:
                return self._start_all_gather(output, source, group)
            work = custom(output, source, group, self.waits_block_host)
            return self._in_flight(work, (source,))

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: Rows,
        *,
        group: dist.ProcessGroup,
        label: str,
        keep_signs: bool = True,
    ) -> InFlight:
        """Sum row ``r`` of every rank's ``source [ranks, n]`` into ``output [n]`` on rank ``r``.

        ``source`` is a tensor, or the rows of ``allocate_rows``. ``output`` may have a wider dtype.
        Collective, stream and lifetime as for ``all_gather``. With ``keep_signs`` a sum of negative
        zeros is a negative zero.
        """
        if group.size() == 1:
            if source[0] is not output:
                output.copy_(source[0])
            return self.record(*source)
        self._announce("reduce_scatter", source[0], group, label, rows=group.size())
        with profiled("reduce_scatter", label):
            if self._custom.reduce_scatter is None:
                return self._start_reduce_scatter(output, source, group, keep_signs=keep_signs)
            assert isinstance(source, torch.Tensor)
            return self._start_custom_reduce_scatter(output, source, group)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        output: torch.Tensor | None = None,
    ) -> InFlight:
        """Sum ``buffer`` over the ranks of ``group``, in place if there is no ``output``.

        ``output`` is allowed only where ``sums_apart``.
        """
        if group.size() == 1:
            return DONE
        self._announce("all_reduce", buffer, group, label)
        with profiled("all_reduce", label):
            return self._start_all_reduce(buffer, group, output)

    # --- for implementations ---------------------------------------------------------------

    def _start_all_gather(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
    ) -> InFlight:
        raise NotImplementedError

    def _start_reduce_scatter(
        self, output: torch.Tensor, source: Rows, group: dist.ProcessGroup, *, keep_signs: bool
    ) -> InFlight:
        raise NotImplementedError

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, output: torch.Tensor | None
    ) -> InFlight:
        raise NotImplementedError

    def _in_flight(
        self,
        work: dist.Work | None,
        keep: tuple[torch.Tensor, ...],
        then: Callable[[], object] | None = None,
    ) -> InFlight:
        """Return a wait for ``work`` (None: done), then ``then``; ``keep`` lives until it."""
        raise NotImplementedError

    def _start_custom_reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
    ) -> InFlight:
        custom, received = self._custom.reduce_scatter, output
        assert custom is not None
        if output.dtype != source.dtype:
            received = custom.allocate((output.numel(),), dtype=source.dtype, device=source.device)
        op = dist.ReduceOp.SUM
        work = custom(received, source.view(-1), group, op, self.waits_block_host)
        if received is output:
            return self._in_flight(work, (source,))
        return self._in_flight(work, (source, received), lambda: output.copy_(received))

    def _announce(
        self, op: str, payload: torch.Tensor, group: dist.ProcessGroup, label: str, *, rows: int = 1
    ) -> None:
        if not _observers and self._root_numbers is None:
            return
        event = _event(op, payload, group, label, rows)
        if self._root_numbers is not None:
            _check(event, group, self._root_numbers.get(group))
        for observer in tuple(_observers):
            observer(event, self.identity)


@contextlib.contextmanager
def _record(name: str):  # type: ignore[no-untyped-def]  # a generator behind a typed function
    with torch.profiler.record_function(name):
        yield


_NOT_PROFILED = contextlib.nullcontext()


def profiled(what: str, label: str) -> contextlib.AbstractContextManager[None]:
    """Return a ``meshard::what unit`` range while a profiler is active, else a no-op."""
    # The public record_function takes microseconds even without a profiler; this flag does not.
    if is_profiling():
        return _record(f"meshard::{what} {label}")
    return _NOT_PROFILED
