"""The communicator: starts collectives and orders their results.

One call starts a collective, and returns an object for it, such as ``GatherInFlight``. The
collective runs beside compute until the caller waits for this object (``wait`` or ``rows``). Just
before a collective is issued, ``announced`` reports it to the check of ``MESHARD_DEBUG=1``, which
raises if the ranks differ, and to observers such as ``CommLedger``.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from meshard._comm import spans
from meshard._comm.divergence import RootNames, check_fingerprint, is_debugging
from meshard._comm.spans import Clock, clock_of, profiled
from meshard._comm.stalls import Collective, spoken
from meshard._torch.private import backend_of, is_profiling
from meshard.policies import AllGather, Comm, ReduceScatter

# A matrix with one row per rank, in rank order, as a list of blocks. A block [k, n] has k rows.
# Usually one block has all rows. With shared memory each row may be a block of its own: gathered
# rows stay in the memory of their ranks, and of rows to be sent, only those for other ranks lie in
# shared memory.
Rows = list[torch.Tensor]


class StepPhase(enum.Enum):
    """A part of a training step. Each part needs different memory for its collectives."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # of an optimizer


class CommStream(enum.Enum):
    """A kind of work that on a device has a stream of its own, on which it runs in order."""

    GATHER = "gather"
    SCATTER = "scatter"
    ALL_REDUCE = "all_reduce"
    HOST = "host"
    OPTIMIZER = "optimizer"


# --- what is in flight -----------------------------------------------------------------------


class Pending(Protocol):
    """Work that has been started."""

    def wait(self) -> None:
        """Make all that the caller does next run after this work. May be called repeatedly."""

    def poll(self) -> bool:
        """Return whether the work is known to be done, without blocking.

        If so, also do what ``wait`` does.
        """


class InFlight(Pending, Protocol):
    """A collective that has been started."""

    def abandon(self) -> None:
        """Give up the result after an error, so that input and output can be freed.

        Raises nothing. Waits only if the backend may still use the memory of input or output.
        """


class GatherInFlight(Protocol):
    """An all-gather that has been started. It keeps the tensors alive that the gather uses."""

    def rows(self) -> Rows:
        """Wait, and return what the ranks sent. The caller must not write to the rows."""

    def release(self) -> None:
        """Release the rows, which must not be read afterwards.

        With shared memory the rows lie in memory of other ranks, which may reuse it only after
        that.
        """

    def abandon(self) -> None:
        """Give up the gather after an error, as ``InFlight.abandon`` does."""


class ReceiveMemory(NamedTuple):
    """Memory for the result of a unit's gathers. Reusing it is faster than allocating each time."""

    flat: torch.Tensor
    rows: torch.Tensor  # the same memory as [ranks, n]
    free: Callable[[], None] | None = None


# Returns the memory for a gather, given its source and the number of ranks.
Receive = Callable[[torch.Tensor, int], ReceiveMemory]


class Gathered(NamedTuple):
    """An all-gather whose result is in memory of this rank."""

    gathered: Rows
    pending: InFlight
    source: torch.Tensor | None = None  # kept alive: the collective reads it
    free: Callable[[], None] | None = None  # frees ``gathered``

    def rows(self) -> Rows:
        self.pending.wait()
        return self.gathered

    def release(self) -> None:
        if self.free is not None:
            self.free()

    def abandon(self) -> None:
        self.pending.abandon()
        self.release()


class Reducing(NamedTuple):
    """A reduce-scatter that has been started. It keeps the tensors alive that it uses."""

    pending: InFlight
    rows: Rows  # the send buffer; ``free_if_sent`` empties the list
    sum: torch.Tensor  # of this rank's row over all ranks, [n]; valid after ``pending.wait()``

    def free_if_sent(self) -> bool:
        """Free the send buffer if the collective is done. Return whether it has been freed."""
        if self.rows and self.pending.poll():
            self.rows.clear()
        return not self.rows


class Exchanging(NamedTuple):
    """An all-to-all that has been started. It keeps the tensors alive that it uses."""

    pending: InFlight
    received: torch.Tensor  # what the ranks sent, in rank order; valid after ``pending.wait()``


class RecordedWork(InFlight, Protocol):
    """Local work that has been queued."""

    def synchronize(self) -> None:
        """Block the host until the work is done. May be called repeatedly."""


class Done:
    """Work that is done already, such as an all-reduce in a group of one rank."""

    def wait(self) -> None: ...

    def poll(self) -> bool:
        return True

    def abandon(self) -> None: ...

    def synchronize(self) -> None: ...


DONE = Done()

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


_NOTHING = contextlib.nullcontext()


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

    Checks that the ranks agree, and calls observers. A profiler or a trace records the context.

    ``payload`` is the larger buffer of the collective, or one of ``rows`` equal parts of it. If the
    size of the buffer differs between ranks, ``numel`` is the number of elements to report instead.
    Under ``MESHARD_DEBUG=1`` this raises a RuntimeError if the ranks are about to issue different
    collectives.
    """
    is_checked = is_debugging() if comm is None else comm.is_checked
    if not (observers or is_checked or spans.recorder is not None or is_profiling()):
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
    clock = clock_of(payload.device) if comm is None else comm.clock
    return profiled(op, label, clock, event)


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

    In a group for which ``is_alone`` is true, no collective is issued. ``label`` is the name of the
    unit, for observers, errors and the profiler. ``MESHARD_DEBUG`` is read when the communicator is
    made.
    """

    waits_block_host: bool  # whether InFlight.wait blocks the calling thread, and not a stream
    clock: Clock = spans.HOST  # the clock that traces read

    def __init__(self) -> None:
        self.identity = object()  # tells observers which root issued a collective
        self.is_checked = is_debugging()
        # By group: a name of this root on which all ranks of the group agree.
        self.root_names: RootNames = {}
        self._custom: CommSettings | None = None  # the user's own collectives; None: there are none

    # --- variants that share streams and memory --------------------------------------------

    def with_custom(self, custom: CommSettings) -> Communicator:
        """Return a communicator on the same streams that uses the user's collectives."""
        if custom.all_reduce is dist.all_reduce:
            custom = replace(custom, all_reduce=None)
        if custom == CommSettings():
            return self
        variant = copy.copy(self)
        variant._custom = custom
        return variant

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

    def record(self, *keep: torch.Tensor, after: Pending | None = None) -> RecordedWork:
        """Return a handle for the work that the current stream has queued so far.

        The handle keeps ``keep`` alive. ``after`` is the collective that precedes the work: a trace
        counts a wait for the handle as a wait for that collective.
        """
        raise NotImplementedError

    def gather_after(self, event: Any) -> None:
        """Let the next use of the gather stream wait for ``event``, not for the caller's stream.

        Only a communicator with streams does this; the others ignore the call.
        """

    def enter_after(self, comm_stream: CommStream, pending: Pending) -> None:
        """Let the next use of ``comm_stream`` also wait for ``pending``."""
        pending.wait()

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors of other streams alive until the device has done the current stream's work.

        Only a communicator with streams does this.
        """

    # --- memory ----------------------------------------------------------------------------

    def allocate_source(
        self, numel: int, dtype: torch.dtype, *, device: torch.device, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return an uninitialised tensor ``[numel]``, to be sent in one gather and then dropped."""
        return torch.empty(numel, dtype=dtype, device=device)

    def send_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        as_one: bool = False,
    ) -> Rows:
        """Return uninitialised rows ``[numel]``, one per rank, to pass to one ``reduce_scatter``.

        With ``as_one``, they are one block.
        """
        count = group.size()
        custom = None if self._custom is None else self._custom.reduce_scatter
        return [self._allocate((count, numel), dtype, device, group, custom)]

    def begin_phase(self, phase: StepPhase, *, is_tight: bool = False) -> None:
        """Free memory that was kept for later collectives, if ``phase`` has no use for it.

        With ``is_tight``, free all memory that no collective in flight uses.
        """

    def memory_report(self, groups: Iterable[dist.ProcessGroup]) -> str:
        """Return a line on how ranks of one host exchange data in ``groups``, for ``describe``."""
        return ""

    # --- collectives: all ranks of ``group`` call them, and they are queued on the caller's stream.
    # The caller must keep a returned object until it has waited for that object. -----------

    def is_alone(self, group: dist.ProcessGroup) -> bool:
        """Whether ``group`` has no other rank, so that nothing is sent in it."""
        return group.size() == 1

    def gather(
        self,
        source: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        receive: Receive | None = None,
    ) -> GatherInFlight:
        """Start gathering every rank's ``source [n]``.

        ``receive`` returns memory for the result, perhaps that of the caller's previous gather. So
        it is called only if waits block the host: on a device, a stream may still be reading the
        previous result.
        **Lifetime:** ``source`` must not be edited until the rows are released.
        """
        if self.is_alone(group):
            return Gathered([source.view(1, -1)], self.record(source))
        with announced("all_gather", source, group, label, rows=group.size(), comm=self):
            custom = None if self._custom is None else self._custom.all_gather
            if custom is None:
                in_own_memory = self._start_gather(source, group, label, receive)
                if in_own_memory is not None:
                    return in_own_memory
            shape = (group.size() * source.numel(),)
            flat = self._allocate(shape, source.dtype, source.device, group, custom)
            if custom is None:
                pending = self._start_all_gather(flat, source, group, label)
            else:
                work = custom(flat, source, group, self.waits_block_host)
                pending = self._in_flight(work, ("all_gather", label), group, source)
            return Gathered([flat.view(group.size(), -1)], pending, source)

    def reduce_scatter(
        self,
        rows: Rows,
        sum_dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        label: str,
        keep_signs: bool = True,
    ) -> Reducing:
        """Start a reduce-scatter: rank ``r`` gets the sum of row ``r`` over all ranks.

        The rows may be overwritten and freed, so the caller must not use them afterwards.
        ``sum_dtype`` is the dtype of the rows, or a wider one. With ``keep_signs`` a sum of
        negative zeros is a negative zero.
        """
        first, is_alone = rows[0], self.is_alone(group)
        custom = None if self._custom is None else self._custom.reduce_scatter
        if first.dtype == sum_dtype and (is_alone or 1 < group.size() == len(rows)):
            # This rank's own row is a block by itself and is not sent, so it can hold the sum.
            total = rows[group.rank()].view(-1)
        else:
            total = self._allocate((first.size(1),), sum_dtype, first.device, group, custom)
            if is_alone:
                total.copy_(first.view(-1))
        if is_alone:
            return Reducing(self.record(*rows), rows, total)
        with announced("reduce_scatter", first, group, label, rows=len(rows), comm=self):
            if custom is None:
                pending = self._start_reduce_scatter(
                    total, rows, group, label, keep_signs=keep_signs
                )
            else:
                (source,) = rows
                received, then = total, None
                if total.dtype != source.dtype:
                    received = custom.allocate(
                        total.shape, dtype=source.dtype, device=source.device
                    )
                    then = functools.partial(total.copy_, received)
                op = dist.ReduceOp.SUM
                work = custom(received, source.view(-1), group, op, self.waits_block_host)
                collective = "reduce_scatter", label
                pending = self._in_flight(work, collective, group, source, received, then=then)
        return Reducing(pending, rows, total)

    def all_reduce(self, buffer: torch.Tensor, *, group: dist.ProcessGroup, label: str) -> InFlight:
        """Sum ``buffer`` over the ranks of ``group``, in place."""
        if self.is_alone(group):
            return DONE
        with announced("all_reduce", buffer, group, label, comm=self):
            custom = None if self._custom is None else self._custom.all_reduce
            if custom is None:
                return self._start_all_reduce(buffer, group, label)
            op = dist.ReduceOp.SUM
            work = custom(buffer, op=op, group=group, async_op=self.waits_block_host)
            return self._in_flight(work, ("all_reduce", label), group, buffer)

    def all_to_all(
        self,
        source: torch.Tensor,
        sent: list[int],
        received: list[int],
        *,
        numel: int,
        group: dist.ProcessGroup,
        label: str,
    ) -> Exchanging:
        """Start sending one part of ``source [n]`` to each rank, and receiving one from each.

        The parts lie in rank order. ``sent`` and ``received`` list their numbers of elements.
        ``numel`` is the number of elements that all ranks send together, the same on every rank.
        """
        if self.is_alone(group):
            return Exchanging(self.record(source), source)
        to_others = (source.numel() - sent[group.rank()]) * source.itemsize
        with announced(
            "all_to_all", source, group, label, numel=numel, sent_bytes=to_others, comm=self
        ):
            output = source.new_empty(sum(received))
            work = dist.all_to_all_single(
                output, source, received, sent, group=group, async_op=self.waits_block_host
            )
            pending = self._in_flight(work, ("all_to_all", label), group, source)
        return Exchanging(pending, output)

    # --- for implementations ---------------------------------------------------------------

    def _start_gather(
        self, source: torch.Tensor, group: dist.ProcessGroup, label: str, receive: Receive | None
    ) -> GatherInFlight | None:
        """Start a gather if its result needs no memory of ``_allocate``, else return None."""
        return None

    def _allocate(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        custom: Comm | None,
    ) -> torch.Tensor:
        """Return an uninitialised tensor, allocated by ``custom``, the process group or torch."""
        if self._custom is None or group.size() == 1:
            return torch.empty(shape, dtype=dtype, device=device)
        numel = math.prod(shape)
        if custom is None and self._custom.from_group:
            backend = backend_of(group, device)
            flat: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
            return flat.view(shape)
        make = torch.empty if custom is None else custom.allocate
        return make((numel,), dtype=dtype, device=device).view(shape)

    def _start_all_gather(
        self, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        """Start filling ``output [ranks * n]`` with every rank's ``source [n]``."""
        raise NotImplementedError

    def _start_reduce_scatter(
        self,
        output: torch.Tensor,
        rows: Rows,
        group: dist.ProcessGroup,
        label: str,
        *,
        keep_signs: bool,
    ) -> InFlight:
        raise NotImplementedError

    def _start_all_reduce(
        self, buffer: torch.Tensor, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        raise NotImplementedError

    def _in_flight(
        self,
        work: dist.Work | None,
        collective: Collective,
        group: dist.ProcessGroup,
        *keep: torch.Tensor,
        then: Callable[[], object] | None = None,
    ) -> InFlight:
        """Return a handle that waits for ``work``, if any, and then calls ``then``.

        The handle keeps the tensors ``keep`` alive until the work is done.
        """
        raise NotImplementedError
