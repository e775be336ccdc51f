"""The communicator: starts collectives and orders their results.

One call starts a collective and returns a ``Handle``. The collective runs beside compute until the
caller waits for the handle. A collective takes one contiguous tensor and gives one. Just before it
is issued, ``announced`` reports it to the check of ``MESHARD_DEBUG=1``, which raises if the ranks
differ, and to observers such as ``CommLedger``.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshard._comm.divergence import RootNames, check_fingerprint, is_debugging
from meshard._comm.stalls import Collective, spoken
from meshard._mesh.layout import ROW_BYTES, padded
from meshard._torch.private import backend_of, is_profiling
from meshard.policies import AllGather, Comm, ReduceScatter


class CommStream(enum.Enum):
    """A kind of work that on a device has a stream of its own, on which it runs in order."""

    GATHER = "gather"
    SCATTER = "scatter"
    ALL_REDUCE = "all_reduce"
    HOST = "host"  # copies to host memory
    FETCH = "fetch"  # copies of optimizer state from there
    OPTIMIZER = "optimizer"


# --- handles ---------------------------------------------------------------------------------


class Handle(Protocol):
    """A collective, or local work, that has been started.

    It keeps alive what the work uses, until the first ``wait``. On a device that may be the wait of
    a comm stream: whoever waits there must keep these tensors until compute has waited too.
    """

    result: torch.Tensor  # of a collective; valid after ``wait`` and before ``release``

    def wait(self) -> None:
        """Make all that the caller does next run after the work. May be called repeatedly.

        On CPU the host waits, on a device the current stream.
        """

    def done(self) -> bool:
        """Return whether the work is known to be done. Never blocks."""

    def release(self) -> None:
        """Give up the result, whether or not the collective has ended. Raises nothing.

        Waits only if the backend may still use the memory. Other ranks may reuse the memory of a
        gather's result only after its release.
        """

    def synchronize(self) -> None:
        """Block the host until the work is done. May be called repeatedly."""


class Done:
    """Work that is done already, such as a collective in a group of one rank."""

    def __init__(self, result: torch.Tensor | None = None) -> None:
        if result is not None:
            self.result: torch.Tensor = result

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True

    def release(self) -> None: ...

    def synchronize(self) -> None: ...


DONE = Done()

# --- ranges for torch.profiler: without one they cost nothing. ``timeline.py`` reads them -----

# ``meshard::all_gather layers.0`` is around the call that issues a collective, and
# ``meshard::wait all_gather layers.0`` where compute waits for it.
_NOTHING = contextlib.nullcontext()


def ranged(*words: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that torch.profiler, if it records this thread, shows as a range."""
    # record_function takes microseconds even without a profiler, so it is called only with one.
    if not is_profiling():
        return _NOTHING
    return torch.profiler.record_function(f"meshard::{' '.join(words)}")


def mark(*words: str) -> None:
    """Let torch.profiler record a moment: what compute does from now on, until the next mark."""
    if is_profiling():
        with ranged(*words):
            pass


@contextlib.contextmanager
def ranged_in(group: dist.ProcessGroup, *words: str) -> Iterator[None]:
    """Record the block like ``ranged``, with the ranks of ``group`` if that has not all of them."""
    with ranged(*words):
        if group.size() < dist.get_world_size():
            mark("ranks", ",".join(map(str, dist.get_process_group_ranks(group))))
        yield


# --- announcements ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective, as issued by one rank."""

    op: str
    unit: str
    group_size: int
    # Bytes of the larger buffer, such as the output of an all-gather or the input of a
    # reduce-scatter. For an all-to-all: the bytes that all ranks send together, including what each
    # sends to itself.
    payload_bytes: int
    dtype: torch.dtype
    sent_bytes: int | None = None  # bytes that this rank sends to others; None: as in a ring

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends: ``sent_bytes`` if given, else those of a ring algorithm.

        See Patarasuk and Yuan, 2009. For a broadcast, gather or scatter this is only an estimate.
        """
        if self.sent_bytes is not None:
            return self.sent_bytes
        passes = 2 if self.op == "all_reduce" else 1
        return passes * self.payload_bytes * (self.group_size - 1) // self.group_size


# ``announced`` calls each observer before a collective. The third argument is
# ``Communicator.identity``, or None for the collectives of blocking.py, which use no communicator.
Observer = Callable[[CommEvent, dist.ProcessGroup, object | None], None]
observers: list[Observer] = []


def announced(
    op: str,
    payload: torch.Tensor,
    group: dist.ProcessGroup,
    label: str,
    *,
    rows: int = 1,
    numel: int | None = None,
    sent_bytes: int | None = None,
    comm: Communicator | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Report a collective, and return a context in which to issue it.

    Checks that the ranks agree, and calls observers. torch.profiler records the context.

    ``payload`` is the larger buffer of the collective, or one of ``rows`` equal parts of it. If the
    size of the buffer differs between ranks, ``numel`` is the number of elements to report instead.
    Under ``MESHARD_DEBUG=1`` this raises a RuntimeError if the ranks are about to issue different
    collectives.
    """
    is_checked = is_debugging() if comm is None else comm.is_checked
    if not (observers or is_checked or is_profiling()):
        return _NOTHING
    numel = rows * payload.numel() if numel is None else numel
    num_bytes = numel * payload.itemsize
    event = CommEvent(op, label, group.size(), num_bytes, payload.dtype, sent_bytes)
    if is_checked:
        roots = {} if comm is None else comm.root_names
        of_root = f"{roots[group]}, " if group in roots else ""
        check_fingerprint(f"{spoken((op, label))} ({of_root}{numel} x {payload.dtype})", group)
    for observer in tuple(observers):
        observer(event, group, None if comm is None else comm.identity)
    return ranged_in(group, op, label) if is_profiling() else _NOTHING


_logger = logging.getLogger("meshard")


def log_event(event: str, label: str) -> None:
    """Log that ``event`` happens to a unit now. If debug logging is off, this costs one ``if``."""
    if _logger.isEnabledFor(logging.DEBUG):
        rank = dist.get_rank() if dist.is_initialized() else -1  # -1: the group was destroyed
        _logger.debug("rank %d: %s %s", rank, event, label)


# --- what the user brings --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommSettings:
    """The user's replacements for the collectives of one unit, and for the memory they use."""

    all_gather: AllGather | None = None  # allocates its output
    reduce_scatter: ReduceScatter | None = None  # allocates its input and output
    # Has the arguments of ``torch.distributed.all_reduce``.
    all_reduce: Callable[..., dist.Work | None] | None = None
    from_group: bool = False  # allocate with the process group, which may then send without a copy


def can_allocate(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` can allocate memory on ``device``."""
    # torch documents neither ``supports_tensor_alloc`` nor ``allocate_tensor``. They are called
    # nevertheless, because no public method of torch allocates memory that NCCL sends without a
    # copy.
    return bool(backend_of(group, device).supports_tensor_alloc(device))


# --- the interface ---------------------------------------------------------------------------


class Communicator:
    """Collectives on the tensors of one device, for one root.

    In a group of one rank no collective is issued. ``label`` is the name of the unit, for
    observers, errors and the profiler. ``MESHARD_DEBUG`` is read when the communicator is made.
    """

    waits_block_host: bool  # whether Handle.wait blocks the calling thread, and not a stream

    def __init__(self) -> None:
        self.identity = object()  # tells observers which root issued a collective
        self.is_checked = is_debugging()
        # By group: a name of this root on which all ranks of the group agree.
        self.root_names: RootNames = {}
        self._custom = CommSettings()

    # --- variants that share streams and memory --------------------------------------------

    def with_custom(self, custom: CommSettings) -> Communicator:
        """Return a communicator on the same streams that uses the user's collectives."""
        if custom.all_reduce is dist.all_reduce:
            custom = replace(custom, all_reduce=None)
        if custom == self._custom:
            return self
        variant = copy.copy(self)
        variant._custom = custom
        return variant

    @property
    def without_custom(self) -> Communicator:
        """A communicator on the same streams that does not use the user's collectives."""
        return self.with_custom(CommSettings())

    def shared_with(self, own: Communicator) -> Communicator:
        """Return a communicator for another root, with the streams and memory of this one.

        ``own`` is the communicator that the other root has had so far. The new one takes over its
        identity and its root names.
        """
        variant = copy.copy(self)
        variant.identity, variant.root_names = own.identity, own.root_names
        return variant

    # --- streams ---------------------------------------------------------------------------

    def on_stream(self, comm_stream: CommStream) -> contextlib.AbstractContextManager[None]:
        """Queue the work of the block on ``comm_stream``, after all work queued by the caller.

        ``gather_after`` makes an exception.
        """
        raise NotImplementedError

    def record(self, *keep: torch.Tensor, after: Handle | None = None) -> Handle:
        """Return a handle for the work that the current stream has queued so far.

        The handle keeps ``keep`` alive until its first wait. ``after`` is the collective that
        precedes the work: a profiler shows a wait for the handle as a wait for that collective.
        """
        raise NotImplementedError

    def gather_after(self, event: Any) -> None:
        """Let the next use of the gather stream wait for ``event``, not for the caller's stream.

        Only a communicator with streams does this; the others ignore the call.
        """

    def enter_after(self, comm_stream: CommStream, handle: Handle) -> None:
        """Let the next use of ``comm_stream`` also wait for ``handle``."""
        handle.wait()

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors of other streams alive until the device has done the current stream's work.

        Only a communicator with streams does this.
        """

    # --- memory ----------------------------------------------------------------------------

    def gather_memory(
        self, numel: int, dtype: torch.dtype, *, device: torch.device, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return uninitialised memory ``[ranks, numel]`` for the result of the next gather.

        The caller may write what it sends to its own row.
        """
        return self._allocate((group.size(), numel), dtype, device, group, self._custom.all_gather)

    def send_memory(
        self, numel: int, dtype: torch.dtype, *, device: torch.device, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return uninitialised memory ``[ranks, numel]`` to send by the next ``reduce_scatter``."""
        if self._custom.reduce_scatter is not None:  # which gets memory of its own
            return torch.empty(group.size(), numel, dtype=dtype, device=device)
        return self._allocate((group.size(), numel), dtype, device, group, None)

    def _allocate(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        custom: Comm | None,
    ) -> torch.Tensor:
        """Return an uninitialised tensor, allocated by ``custom``, the process group or torch."""
        numel = math.prod(shape)
        if group.size() > 1 and custom is not None:
            return custom.allocate((numel,), dtype=dtype, device=device).view(shape)
        if group.size() > 1 and self._custom.from_group:
            backend = backend_of(group, device)
            flat: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
            return flat.view(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    def memory_report(self, groups: Iterable[dist.ProcessGroup]) -> str:
        """Return a line on how ranks of one host exchange data in ``groups``, for ``describe``."""
        return ""

    # --- collectives: all ranks of ``group`` call them, and they are queued on the caller's stream.
    # The caller must keep a returned handle until it has waited for it. -------------------

    def all_gather(
        self,
        source: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        memory: torch.Tensor | None = None,
    ) -> Handle:
        """Start gathering every rank's ``source [n]``. The result is ``[ranks, n]``.

        ``memory`` is from ``gather_memory``; None: it is allocated here.
        **Lifetime:** ``source`` must not be edited until the handle is released.
        """
        if group.size() == 1:
            return self._local(source.view(1, -1))
        with announced("all_gather", source, group, label, rows=group.size(), comm=self):
            if memory is None:
                memory = self.gather_memory(
                    source.numel(), source.dtype, device=source.device, group=group
                )
            custom = self._custom.all_gather
            if custom is None:
                return self._start_all_gather(memory, source, group, label)
            work = custom(memory.view(-1), source, group, self.waits_block_host)
            return self._handle(work, memory, ("all_gather", label), group, source)

    def reduce_scatter(
        self,
        rows: torch.Tensor,
        sum_dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        label: str,
        num_counts: int = 0,
    ) -> Handle:
        """Start a reduce-scatter of ``rows [ranks, n]``: rank ``r`` gets the sum ``[n]`` of row r.

        The rows may be overwritten and freed, so the caller must not use them afterwards.
        ``sum_dtype`` is the dtype of the rows, or a wider one. The last ``num_counts`` columns are
        the same in all rows, and a positive number must stay positive there. So a user's own
        reduce-scatter, which may round what it sends, does not get them.
        """
        if group.size() == 1:
            return self._local(rows.view(-1).to(sum_dtype))
        custom = self._custom.reduce_scatter
        if custom is not None:
            return self._custom_reduce_scatter(rows, sum_dtype, custom, group, label, num_counts)
        with announced("reduce_scatter", rows, group, label, comm=self):
            return self._start_reduce_scatter(rows, sum_dtype, group, label)

    def _custom_reduce_scatter(
        self,
        rows: torch.Tensor,
        sum_dtype: torch.dtype,
        custom: ReduceScatter,
        group: dist.ProcessGroup,
        label: str,
        num_counts: int,
    ) -> Handle:
        numel, size = rows.size(1) - num_counts, group.size()
        row, dtype, device = padded(numel, ROW_BYTES), rows.dtype, rows.device
        sent = custom.allocate((size * row,), dtype=dtype, device=device)
        received = custom.allocate((row,), dtype=dtype, device=device)
        sent.view(size, row).zero_()[:, :numel] = rows[:, :numel]
        total = torch.empty(rows.size(1), dtype=sum_dtype, device=rows.device)
        with announced("reduce_scatter", sent, group, label, comm=self):
            work = custom(received, sent, group, dist.ReduceOp.SUM, self.waits_block_host)
        counts = rows[0, numel:].clone()
        counted = self.without_custom.all_reduce(counts, group=group, label=label)

        def put_together() -> None:
            counted.wait()
            torch.cat([received[:numel].to(sum_dtype), counts.to(sum_dtype)], out=total)

        keep = rows, sent, received, counts
        collective = "reduce_scatter", label
        return self._handle(work, total, collective, group, *keep, then=put_together)

    def all_reduce(
        self, buffer: torch.Tensor, *, group: dist.ProcessGroup, label: str, num_counts: int = 0
    ) -> Handle:
        """Sum ``buffer [n]`` over the ranks of ``group``, in place.

        ``num_counts``: see ``reduce_scatter``.
        """
        if group.size() == 1:
            return self._local(buffer)
        custom, numel = self._custom.all_reduce, buffer.numel() - num_counts
        if custom is None:
            with announced("all_reduce", buffer, group, label, comm=self):
                return self._start_all_reduce(buffer, group, label)
        values, counts = buffer[:numel], buffer[numel:]
        with announced("all_reduce", values, group, label, comm=self):
            op = dist.ReduceOp.SUM
            work = custom(values, op=op, group=group, async_op=self.waits_block_host)
        counted: Handle = DONE
        if num_counts:
            counted = self.without_custom.all_reduce(counts, group=group, label=label)
        return self._handle(work, buffer, ("all_reduce", label), group, then=counted.wait)

    def all_to_all(
        self,
        source: torch.Tensor,
        sent: list[int],
        received: list[int],
        *,
        numel: int,
        group: dist.ProcessGroup,
        label: str,
    ) -> Handle:
        """Start sending one part of ``source [n]`` to each rank, and receiving one from each.

        The parts lie in rank order. ``sent`` and ``received`` list their numbers of elements.
        ``numel`` is the number of elements that all ranks send together, the same on every rank.
        The result has what the ranks sent, in rank order.
        """
        if group.size() == 1:
            return self._local(source)
        to_others = (source.numel() - sent[group.rank()]) * source.itemsize
        with announced(
            "all_to_all", source, group, label, numel=numel, sent_bytes=to_others, comm=self
        ):
            output = source.new_empty(sum(received))
            work = dist.all_to_all_single(
                output, source, received, sent, group=group, async_op=self.waits_block_host
            )
            return self._handle(work, output, ("all_to_all", label), group, source)

    # --- for implementations ---------------------------------------------------------------

    def _start_all_gather(
        self, memory: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        """Start filling ``memory [ranks, n]`` with every rank's ``source [n]``."""
        raise NotImplementedError

    def _start_reduce_scatter(
        self, rows: torch.Tensor, sum_dtype: torch.dtype, group: dist.ProcessGroup, label: str
    ) -> Handle:
        """Start a reduce-scatter, whose result ``[n]`` may have a wider dtype than ``rows``."""
        raise NotImplementedError

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> Handle:
        raise NotImplementedError

    def _local(self, result: torch.Tensor) -> Handle:
        """Return a handle for ``result``, which the current stream has computed."""
        return Done(result)

    def _handle(
        self,
        work: dist.Work | None,
        result: torch.Tensor,
        collective: Collective,
        group: dist.ProcessGroup,
        *keep: torch.Tensor,
        then: Callable[[], object] | None = None,
    ) -> Handle:
        """Return a handle that waits for ``work``, if any, and then calls ``then``.

        The handle keeps the tensors ``keep`` alive until the work is done.
        """
        raise NotImplementedError
