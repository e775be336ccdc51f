"""The communicator interface.

A collective is started by one call and finished by ``wait()`` on what it returned; between the two
it runs beside the compute. Here is the interface. The implementations are ``shared_memory`` for
CPU tensors of ranks on one host, ``work_communicator`` for other CPU tensors and ``streams`` for
devices; but for ``scalars`` and ``setup_communicator``, nobody else calls collectives.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


class StepPhase(enum.Enum):
    """What a communicator may keep memory for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # of an optimizer; then all of it again


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

    ``payload_bytes`` is the size of the whole buffer: what an all-gather yields, what a
    reduce-scatter or an all-reduce is given.
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
        """Order what the caller does next after the collective. Again, for another stream."""

    def poll(self) -> bool:
        """Do what ``wait`` does if the host need not block for it. Whether it is done."""


class GatheredViews(InFlight, Protocol):
    """An all-gather whose rows are read where they lie."""

    def rows(self) -> list[torch.Tensor]:
        """Wait for the rows, and return them in rank order. They are to be read only."""

    def release(self) -> None:
        """Let the other ranks use their memory again; the rows may not be read any more."""


class RecordedWork(InFlight, Protocol):
    """Local work that has been queued."""

    def synchronize(self) -> None:
        """Block the host until it is over. Call it as often as you like."""


class Communicator(Protocol):
    """Starts collectives and says when their results may be used.

    Groups of one rank issue nothing; the data is copied, so that what surrounds a collective need
    not know. ``label`` is the name of the unit, for the ledger and the profiler.
    """

    waits_block_host: bool
    """Whether ``InFlight.wait`` blocks the calling thread (and not a device stream)."""

    may_keep_buffers: bool
    """Whether what ``all_gather`` fills may be memory of the caller's that only the host uses."""

    @property
    def identity(self) -> object:
        """What observers are told issued a collective."""

    def on_stream(self, comm_stream: CommStream) -> contextlib.AbstractContextManager[None]:
        """Queue what is inside on ``comm_stream``, after all that the caller has queued so far."""

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """Give back memory that is kept for the next collectives: a part of a step begins.

        Args:
            keep_for: But for what this has needed in the last steps; None: everything.
        """

    def allocate_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """Return what ``reduce_scatter`` is to be given, row by row; None: one tensor.

        The other ranks read their rows ``[numel]`` where they lie. This rank's is ``own``, if that
        is given, else ordinary memory; it may be the ``output``.
        """

    def all_gather(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
    ) -> InFlight:
        """Fill ``output [ranks * n]`` with every rank's ``source [n]``, in rank order.

        **Collective:** all ranks of ``group``. **Stream:** the lane of the caller.
        **Lifetime:** both tensors must live until ``wait`` has returned.
        """

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

        ``source`` is a tensor, or what ``allocate_rows`` has lent, filled.
        ``output`` may be of a wider dtype than ``source``. Collective, stream and lifetime as for
        ``all_gather``. With ``keep_signs`` a sum of negative zeros is a negative zero.
        """

    def all_reduce(
        self,
        buffer: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        output: torch.Tensor | None = None,
    ) -> InFlight:
        """Sum ``buffer`` over the ranks of ``group``, in place if there is no ``output``.

        Another ``output`` only where ``sums_apart``.
        """

    def sums_apart(self, group: dist.ProcessGroup) -> bool:
        """Whether ``all_reduce`` reads what ``allocate`` has lent to be sent, and sums elsewhere.

        In place it would have to be copied first.
        """

    def record(self, *keep: torch.Tensor) -> RecordedWork:
        """Return a wait for the local work queued on the current lane; ``keep`` lives until it."""

    def gather_after(self, event: Any) -> None:
        """Have the next use of the gather lane wait for ``event`` instead of for the caller."""

    def enter_after(self, comm_stream: CommStream, pending: InFlight) -> None:
        """Have the next use of ``comm_stream`` wait for ``pending`` too."""

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold ``tensors`` until what is queued on the current lane is over. Nobody waits.

        For memory of other lanes that is used on this one for the last time.
        """

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

        With ``is_sent`` it will be the source of one, whole and once, and then be dropped.
        """

    def gather_views(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> GatheredViews | None:
        """Gather every rank's ``source [n]`` where it lies; None: it must be moved to be read.

        Collective and stream as for ``all_gather``. **Lifetime:** ``source`` must not be edited
        until the rows are given back.
        """


Observer = Callable[[CommEvent, object], None]
_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Have ``observer(event, communicator)`` called for every collective that is issued."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Undo ``add_observer``."""
    _observers.remove(observer)


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""

    def poll(self) -> bool:
        """Return that it is done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


DONE = Done()


class BaseCommunicator:
    """What the implementations share: telling observers, and ordinary memory."""

    may_keep_buffers = False

    @property
    def identity(self) -> object:
        """See ``Communicator.identity``."""
        return self

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
        return torch.empty(numel, dtype=dtype, device=device)

    def gather_views(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> GatheredViews | None:
        """See ``Communicator.gather_views``: a copy has to be sent."""
        return None

    def enter_after(self, comm_stream: CommStream, pending: InFlight) -> None:
        """See ``Communicator.enter_after``: the host waits."""
        pending.wait()

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Communicator.hold_until_done``: it is over."""

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """See ``Communicator.release_cached_memory``: there is none."""

    def allocate_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """See ``Communicator.allocate_rows``: one tensor is sent."""
        return None

    def sums_apart(self, group: dist.ProcessGroup) -> bool:
        """See ``Communicator.sums_apart``."""
        return False

    def observe(
        self,
        op: str,
        payload: torch.Tensor,
        group: dist.ProcessGroup,
        label: str,
        *,
        rows: int = 1,
    ) -> None:
        """Tell every observer of a collective about to be issued.

        Args:
            op: Which.
            payload: The whole buffer, or one of ``rows`` rows of it.
            group: Who takes part.
            label: Name of the unit.
            rows: How many there are.
        """
        if _observers:
            event = CommEvent(
                op,
                label,
                group.size(),
                rows * payload.numel() * payload.itemsize,
                payload.dtype,
            )
            notify_observers(event, self.identity)


@contextlib.contextmanager
def _record(name: str):  # type: ignore[no-untyped-def]  # a generator behind a typed function
    with torch.profiler.record_function(name):
        yield


def notify_observers(event: CommEvent, communicator: object = None) -> None:
    """Tell every observer of a collective that is about to be issued."""
    for observer in tuple(_observers):
        observer(event, communicator)


_NOTHING = contextlib.nullcontext()


def profiled(what: str, label: str) -> contextlib.AbstractContextManager[None]:
    """Return a ``meshard::what unit`` range while a profiler is active, else a no-op."""
    # The public record_function costs microseconds even when nobody listens; this flag does not.
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _record(f"meshard::{what} {label}")
    return _NOTHING
