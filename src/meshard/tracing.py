"""Traces of steps: what ran when on each rank, in a file for Perfetto."""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import Self

from meshard._comm import spans
from meshard._comm.blocking import gather_objects, gather_objects_to_first
from meshard._comm.communicator import CommEvent
from meshard._comm.spans import Clock, Moment
from meshard._comm.stalls import Waiting
from meshard._torch.private import timeout_of
from meshard.timeline import LANES, Summary, lane_of, summarize

_ALL_LEFT, _RAISED = "all left", "raised"
_ROUND_TRIPS = 10  # to compare the clocks of two hosts
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_logger = logging.getLogger("meshard")
# How many traces have ended in each group.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Trace:
    """What ``meshard.trace`` gives to the block.

    Attributes:
        path: Of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be that of a file, got {path!r}.")
        self.path = Path(path)
        self._summary: Summary | None = None

    @property
    def summary(self) -> Summary:
        """The communication and memory of this rank, once the context was left."""
        if self._summary is None:
            raise RuntimeError("a trace has a summary once its context was left.")
        return self._summary


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Trace]:
    """Record what meshard does inside a ``with`` block, on all ranks, and write it to a file.

    https://ui.perfetto.dev and ``python -m meshard timeline`` open the file. It has a process per
    rank, with a lane for compute (forward and backward of each unit, and exposed waits for
    communication), for each kind of collective, for optimizers and for copies of offloaded shards.
    A counter shows memory as each unit begins or ends: on a device that of all tensors, as the host
    had allocated it when it queued the work; on the CPU the resident memory of the process. The
    times of a device come from events on its streams, which are read as the context is left.
    Collectives that are in flight as the block begins are left out. All models of the process are
    recorded, whichever threads run them.

    **Collective:** leaving the context, on all ranks of the default process group, if there is one.
    The first rank gets the parts of all ranks, and alone writes ``path``. If the block raises on a
    rank, that rank communicates nothing, and each rank writes its own part to a file like
    ``trace.rank1.json``, on the disk of its host. So it does if a rank comes later than the timeout
    of the group, or if the group was destroyed inside the block.

    Args:
        path: Of the file, on the first rank. It is overwritten; missing folders are made.

    Raises:
        RuntimeError: Another trace is active in this process.

    >>> import tempfile, torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 4))
    >>> with meshard.trace(f"{tempfile.mkdtemp()}/trace.json") as traced:
    ...     layer(torch.ones(1, 4)).sum().backward()
    >>> traced.summary.kinds  # one rank communicates nothing
    {}
    """
    traced, recorder = Trace(path), Recording()
    spans.start(recorder)
    try:
        yield traced
    except BaseException:
        spans.stop()
        try:
            _leave_after_error(traced, recorder)
        except Exception as error:  # that of the block counts
            _logger.warning("the trace of a block that raised was not written: %s", error)
        raise
    spans.stop()
    _leave(traced, recorder)


# --- recording --------------------------------------------------------------------------------


class _Span:
    """A range, while it is recorded and afterwards."""

    def __init__(
        self, open_ones: list[_Span], what: str, label: str, clock: Clock, event: CommEvent | None
    ) -> None:
        self.what, self.label, self.clock, self.event = what, label, clock, event
        self.is_beside = clock.is_beside_compute
        self.began: Moment = None
        self.ended: Moment = None
        self.waits: list[tuple[Moment, Moment]] = []
        self.is_async = False
        self._open_ones = open_ones

    def __enter__(self) -> Self:
        self._open_ones.append(self)
        self.began = self.clock.now()
        return self

    def __exit__(self, *_: object) -> None:
        self._open_ones.remove(self)
        if not self.is_async:
            self.ended = self.clock.now()

    def ends_later(self) -> None:
        self.is_async = True

    def end(self) -> None:
        self.ended = self.clock.now()

    def waited(self, began: Moment, ended: Moment) -> None:
        self.waits.append((began, ended))


class _Phase(NamedTuple):
    """A phase of a unit that compute has begun. The next one ends it."""

    began: Moment
    phase: str
    label: str
    clock: Clock
    bytes_alive: int


class Recording:
    """What a rank has recorded since the recorder was made."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.spans: list[_Span] = []
        self.phases: list[_Phase] = []
        self._open = threading.local()
        self.rank: int | None = None  # once it is known that there are several
        self.find_rank()

    def find_rank(self) -> None:
        """Remember the rank: the process group may be destroyed before the context is left."""
        if self.rank is None and (group := all_ranks()) is not None:
            self.rank = group.rank()

    def _open_ones(self) -> list[_Span]:
        if not hasattr(self._open, "spans"):
            self._open.spans = []
        found: list[_Span] = self._open.spans
        return found

    def span(
        self, what: str, label: str, clock: Clock, event: CommEvent | None
    ) -> AbstractContextManager[object]:
        """Record a range, and return its context."""
        span = _Span(self._open_ones(), what, label, clock, event)
        self.spans.append(span)
        return span

    def issued(self) -> _Span | None:
        """Return the collective that this thread is issuing."""
        open_ones = self._open_ones()
        return open_ones[-1] if open_ones and open_ones[-1].event is not None else None

    def enter(self, phase: str, label: str, clock: Clock) -> None:
        """Record that compute begins a phase of a unit."""
        self.find_rank()
        alive = clock.bytes_alive() if clock.memory_kind else 0
        self.phases.append(_Phase(clock.now(), phase, label, clock, alive))


# --- what was recorded, as spans of lanes -----------------------------------------------------


class Piece(NamedTuple):
    """A span of a lane, in seconds."""

    began: float
    ended: float
    lane: str
    category: str
    name: str
    args: dict[str, Any]


class Part(NamedTuple):
    """What one rank has recorded, in seconds of its clock."""

    began: float
    ended: float
    pieces: list[Piece]
    memory: list[tuple[float, int]]  # bytes alive
    memory_kind: str


Interval = tuple[float, float]


def resolved(recorder: Recording) -> Part:
    """Wait for devices, and return what was recorded."""
    clocks = {each.clock for each in recorder.spans} | {each.clock for each in recorder.phases}
    seconds = {clock: clock.settle() for clock in clocks}
    left = time.monotonic()
    pieces: list[Piece] = []
    waits: list[Piece] = []
    busy: list[Interval] = []  # compute does something else than its phase
    for span in recorder.spans:
        if span.began is None:
            continue  # in a graph that was captured
        when = seconds[span.clock]
        if span.event is not None:
            collective, exposed = _collective_of(span, span.event, when, left)
            pieces.append(collective)
            waits += exposed
            continue
        began, ended = when(span.began), left if span.ended is None else when(span.ended)
        pieces.append(Piece(began, ended, lane_of(span.what), span.what, span.label, {}))
        if not span.is_beside:
            busy.append((began, ended))
    waits = _one_after_the_other(waits)
    busy += [(each.began, each.ended) for each in waits]
    pieces += waits
    pieces += _pieces_of_phases(recorder, seconds, disjoint(busy), left)
    memory = [
        (seconds[each.clock](each.began), each.bytes_alive)
        for each in recorder.phases
        if each.clock.memory_kind and each.began is not None
    ]
    kinds = {each.clock.memory_kind for each in recorder.phases} - {""}
    return Part(recorder.began, left, pieces, memory, ", ".join(sorted(kinds)))


def _collective_of(
    span: _Span, event: CommEvent, when: Callable[[Moment], float], left: float
) -> tuple[Piece, list[Piece]]:
    """Return a collective, and the waits of compute for it while it was in flight."""
    began, ended = when(span.began), left if span.ended is None else when(span.ended)
    waited = [(when(start), when(end)) for start, end in span.waits if end is not None]
    if waited:
        # A callback that ends the collective may come late, as Python runs one thread at a time.
        # Compute goes on only after the end.
        ended = min(ended, max(end for _, end in waited))
    if not (span.is_async or span.is_beside):
        waited = [(began, ended)]  # it has blocked compute from start to end
    exposed = disjoint((max(began, start), min(ended, end)) for start, end in waited)
    lane = lane_of(span.what)
    args = {
        "unit": span.label,
        "op": event.op,
        "bytes": event.payload_bytes,
        "sent bytes": event.wire_bytes,
        "ranks": event.group_size,
        "dtype": str(event.dtype).removeprefix("torch."),
        "exposed us": 1e6 * sum(end - start for start, end in exposed),
    }
    name, wait = f"{lane} {span.label}", f"wait: {lane} of {span.label}"
    of_wait = {"unit": span.label, "kind": lane}
    return (
        Piece(began, ended, lane, "communication", name, args),
        [Piece(*each, "compute", "wait", wait, of_wait) for each in exposed],
    )


def _one_after_the_other(waits: list[Piece]) -> list[Piece]:
    """Return waits in order, each without the time of those before it."""
    found: list[Piece] = []
    for each in sorted(waits, key=lambda wait: wait.began):
        began = max(each.began, found[-1].ended) if found else each.began
        if began < each.ended:
            found.append(each._replace(began=began))
    return found


def _pieces_of_phases(
    recorder: Recording, seconds: dict[Clock, Any], busy: list[Interval], left: float
) -> Iterator[Piece]:
    """Iterate over the phases, without the intervals in which compute was ``busy`` otherwise."""
    known = [each for each in recorder.phases if each.began is not None]
    starts = [seconds[each.clock](each.began) for each in known]
    position = 0
    for each, began, ended in zip(known, starts, (*starts[1:], left), strict=False):
        if not each.phase:
            continue
        lane = "optimizer" if each.phase == "optimizer" else "compute"
        name = each.label if lane == "optimizer" else f"{each.phase} {each.label}"
        while position < len(busy) and busy[position][1] <= began:
            position += 1
        for start, end in busy[position : bisect.bisect_left(busy, (ended,))]:
            if began < start:
                yield Piece(began, start, lane, each.phase, name, {"unit": each.label})
            began = max(began, end)
        if began < ended:
            yield Piece(began, ended, lane, each.phase, name, {"unit": each.label})


def disjoint(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order. Those that are empty are left out."""
    found: list[Interval] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        elif began < ended:
            found.append((began, ended))
    return found


# --- the file ---------------------------------------------------------------------------------


def _events(part: Part, rank: int, *, offset: float, zero: float) -> Iterator[dict[str, Any]]:
    """Iterate over the events of Chrome's format, in microseconds since ``zero``."""

    def micro(seconds: float) -> float:
        return round(1e9 * (seconds + offset - zero)) / 1000

    tracks: dict[str, list[float]] = {lane: [] for lane in LANES}  # ends, by lane
    named: set[int] = set()
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for piece in sorted(part.pieces, key=lambda each: (LANES.index(each.lane), each.began)):
        # Collectives that are in flight at the same time get lanes of their own.
        ends = tracks[piece.lane]
        track = next((i for i, end in enumerate(ends) if end <= piece.began), len(ends))
        ends[track : track + 1] = [piece.ended]
        thread = 10_000 * LANES.index(piece.lane) + track
        if thread not in named:
            named.add(thread)
            name = f"{piece.lane} {track + 1}" if track else piece.lane
            head = {"ph": "M", "pid": rank, "tid": thread}
            yield {**head, "name": "thread_name", "args": {"name": name}}
            yield {**head, "name": "thread_sort_index", "args": {"sort_index": thread}}
        began = micro(piece.began)
        yield {
            "ph": "X",
            "pid": rank,
            "tid": thread,
            "cat": piece.category,
            "name": piece.name,
            "ts": began,
            "dur": round(micro(piece.ended) - began, 3),
            "args": piece.args,
        }
    for seconds, num_bytes in part.memory:
        args = {"bytes": num_bytes}
        yield {"ph": "C", "pid": rank, "name": "bytes alive", "ts": micro(seconds), "args": args}


def _write(path: Path, parts: dict[int, Part], offsets: list[Offset]) -> None:
    """Write the parts by rank, on the clock of the first rank."""
    chosen = {rank: offsets[rank] if offsets else Offset(0.0, 0.0) for rank in parts}
    zero = min(part.began + chosen[rank].seconds for rank, part in parts.items())
    events: list[dict[str, Any]] = []
    ranks: dict[str, dict[str, Any]] = {}
    for rank, part in parts.items():
        events += _events(part, rank, offset=chosen[rank].seconds, zero=zero)
        ranks[str(rank)] = {
            "seconds": part.ended - part.began,
            "memory": part.memory_kind,
            "clock error us": 1e6 * chosen[rank].error,
        }
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": ranks}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _summary_of(part: Part, rank: int) -> Summary:
    events = list(_events(part, rank, offset=0.0, zero=part.began))
    return summarize(events, rank, part.ended - part.began, part.memory_kind)


# --- all ranks --------------------------------------------------------------------------------


def all_ranks() -> dist.ProcessGroup | None:
    """Return the default group, if there are other ranks in it; those of a fake one are not."""
    group = dist.group.WORLD if dist.is_initialized() else None
    is_alone = group is None or group.size() == 1 or dist.get_backend(group) == "fake"
    return None if is_alone else group


def _leave_after_error(traced: Trace, recorder: Recording) -> None:
    """Write the part of this rank, after an exception."""
    recorder.find_rank()
    group = all_ranks()
    if group is not None:
        _do_all_leave(group, has_raised=True)
    _write_alone(traced, resolved(recorder), recorder.rank)


def _leave(traced: Trace, recorder: Recording) -> None:
    """Write the file. **Collective:** all ranks, unless one of them has raised."""
    part, group = resolved(recorder), all_ranks()
    if group is None:
        _write_alone(traced, part, recorder.rank)
    elif _do_all_leave(group, has_raised=False):
        traced._summary = _summary_of(part, group.rank())
        offsets = _clock_offsets(group)
        parts = gather_objects_to_first(part, group, label="(trace)")
        if parts:
            _forget_meeting(group)
            _write(traced.path, dict(enumerate(parts)), offsets)
    else:
        _write_alone(traced, part, group.rank())


def _write_alone(traced: Trace, part: Part, rank: int | None) -> None:
    """Write the part of this rank, without communication. ``rank``: None if there are no others."""
    is_alone = rank is None
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    traced._summary = _summary_of(part, rank)
    if not is_alone:
        traced.path = traced.path.with_suffix(f".rank{rank}{traced.path.suffix}")
        _logger.warning(
            "rank %d: inside meshard.trace a rank has raised or ended, or comes too late, or the "
            "process group was destroyed; so this rank writes its own part only, to %s.",
            rank, traced.path,
        )  # fmt: skip
    _write(traced.path, {rank: part}, [])


def _do_all_leave(group: dist.ProcessGroup, *, has_raised: bool) -> bool:
    """Return whether all ranks come, and none has raised. A rank that has does not wait.

    Ranks meet in the store of the group, because a collective would wait for one that has raised.
    """
    _numbers[group] = _numbers.get(group, 0) + 1
    store, key = group.get_group_store(), f"meshard/trace/{_numbers[group]}"

    def agree_on(verdict: str) -> str:
        """Return the verdict of the first rank that has one."""
        return store.compare_set(f"{key}/verdict", "", verdict).decode()

    try:
        if not has_raised:
            if store.add(f"{key}/left", 1) == group.size():
                agree_on(_ALL_LEFT)
            # If this wait times out, go on and write a verdict below. A rank that comes later finds
            # it, and does not wait for this rank.
            with contextlib.suppress(RuntimeError), Waiting("end of a trace", group):
                store.wait([f"{key}/verdict"], timeout_of(group, torch.device("cpu")))
        return agree_on(_RAISED) == _ALL_LEFT
    except RuntimeError as error:  # the rank that has the store may have ended
        _logger.warning("a trace has not found the other ranks: %s", error)
        return False


def _forget_meeting(group: dist.ProcessGroup) -> None:
    """Delete what the ranks have written to the store, which all of them have read."""
    for name in ("left", "verdict"):
        group.get_group_store().delete_key(f"meshard/trace/{_numbers[group]}/{name}")


class Offset(NamedTuple):
    """Seconds to add to the clock of a rank to get that of the first rank, and how sure that is."""

    seconds: float
    error: float


def _clock_offsets(group: dist.ProcessGroup) -> list[Offset]:
    """Return the offset of each rank. The processes of one host have the same clock."""
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    hosts = gather_objects(boot or platform.node(), group, label="(trace)")
    if len(set(hosts)) == 1:
        return [Offset(0.0, 0.0)] * len(hosts)
    trips: list[Interval] = []
    for _ in range(_ROUND_TRIPS):
        before = time.monotonic()
        gather_objects(None, group, label="(trace)")
        trips.append((before, time.monotonic()))
    of_ranks = gather_objects(trips, group, label="(trace)")
    return [
        Offset(0.0, 0.0) if host == hosts[0] else clock_offset(of_ranks[0], of_rank)
        for host, of_rank in zip(hosts, of_ranks, strict=True)
    ]


def clock_offset(ours: list[Interval], theirs: list[Interval]) -> Offset:
    """Return the offset of a clock from the times before and after the same all-gathers.

    No rank leaves an all-gather before all have entered it. So each gives two bounds.
    """
    pairs = list(zip(ours, theirs, strict=True))
    low = max(our[0] - their[1] for our, their in pairs)
    high = min(our[1] - their[0] for our, their in pairs)
    return Offset((low + high) / 2, (high - low) / 2)
