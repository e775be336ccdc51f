"""How long a planned step takes: what was queued on which stream, and how fast that is.

While a job is planned, a tape records what the rank queues: kernels with an amount of *work*,
collectives with their bytes, and which stream waits for what. A profile of a real step says how
many seconds a unit of work takes in each phase of each unit, and how fast each network is. Playing
the tape then tells when everything ends.

The work of a kernel is the bytes that it reads and writes, a byte more for every hundred
floating-point operations (every ten on a CPU), and 64 KiB more because it is launched. Work only
divides measured seconds among kernels, and scales them to other batches, so these numbers need not
be exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from meshard._comm.communicator import CommEvent
from meshard._comm.spans import HOST, Clock

_ON_DEVICE, _ON_CPU = 100, 10  # floating-point operations that take as long as a byte
_LAUNCH = 2**16
# The kernel of the CPU, for which torch counts no operations, computes what that of a device does.
_SAME_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}

Key = tuple[str, str]  # a phase and a unit


def work_of(
    func: Any, args: Any, kwargs: Any, result: Any, *, operations_per_byte: int = _ON_CPU
) -> float:
    """Return the work of a kernel, in bytes."""
    packet = func.overloadpacket
    if "empty" in packet.__name__:
        return 0.0  # no kernel
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values(), result):  # of an operator: tensors, and lists of them
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [each for each in value if isinstance(each, torch.Tensor)]
    if not tensors:
        return 0.0
    work: float = _LAUNCH + sum(each.numel() * each.itemsize for each in tensors)
    count = flop_registry.get(_SAME_AS.get(packet, packet))
    if count is not None:
        work += count(*args, **kwargs, out_val=result) / operations_per_byte
    return work


class WorkRecorder:
    """Tells of each kernel to which phase of which unit it belongs: a recorder of ``spans``.

    ``on_work`` gets the phase and unit, and the work. What runs on the stream of a collective
    belongs to the collective, and is left out.
    """

    def __init__(self, on_work: Callable[[Key, float], None]) -> None:
        self._on_work = on_work
        self._phase: Key = ("", "")
        self._span: list[Key | None] = []  # None: a collective
        self.clock: Clock | None = None  # of compute, once a unit has run

    def kernel(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record that a kernel was queued on the current stream."""
        if self._span:
            key = self._span[-1]
        elif self.clock is not None and self.clock.is_beside_compute:
            key = None
        else:
            key = self._phase
        if key is not None:
            rate = _ON_CPU if self.clock is HOST else _ON_DEVICE
            self._on_work(key, work_of(func, args, kwargs, result, operations_per_byte=rate))

    def span(
        self, what: str, label: str, clock: Clock, event: CommEvent | None
    ) -> AbstractContextManager[object]:
        """Return a context for the kernels of ``what``."""
        if event is None:
            return self._inside((what, label))
        return self._inside(None if clock.is_beside_compute else self._phase)

    @contextlib.contextmanager
    def _inside(self, key: Key | None) -> Iterator[None]:
        self._span.append(key)
        try:
            yield
        finally:
            self._span.pop()

    def issued(self) -> None:
        """Return nothing: no collective is timed."""

    def enter(self, phase: str, label: str, clock: Clock) -> None:
        """Record that compute begins a phase of a unit."""
        self._phase, self.clock = (phase, label), clock


# --- what a rank queues -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that meshard issues, as ``CommLedger`` records it."""

    op: str
    unit: str
    group_size: int
    payload_bytes: int
    wire_bytes: int
    is_between_nodes: bool  # its group has ranks of several nodes

    @classmethod
    def of(cls, event: CommEvent, ranks: Sequence[int], ranks_per_node: int) -> Collective:
        """Return what is known of an event in a group of these global ranks."""
        nodes = {rank // ranks_per_node for rank in ranks}
        sizes = event.group_size, event.payload_bytes, event.wire_bytes
        return cls(event.op, event.unit, *sizes, len(nodes) > 1)

    @property
    def hops(self) -> int:
        """From rank to rank, one after the other, in a ring."""
        return (self.group_size - 1) * (2 if self.op == "all_reduce" else 1)


class _Work(NamedTuple):
    stream: int
    key: Key
    amount: float


class _Sent(NamedTuple):
    stream: int
    collective: Collective


class _Recorded(NamedTuple):
    stream: int
    event: int


class _Waited(NamedTuple):
    stream: int
    event: int


class _StepBegins(NamedTuple):
    pass


class Tape:
    """What a rank queues, in order. Streams have numbers; 0 is that of compute, and of a CPU."""

    def __init__(self) -> None:
        self.stream = 0  # the current one
        self.sent = 0  # the event after the last collective of ``send_beside``
        self._num_streams = 1
        self._wires: dict[Any, int] = {}  # by group
        self._entries: list[_Work | _Sent | _Recorded | _Waited | _StepBegins] = []
        self._num_events = 0
        self._end: int | None = None  # of the entries that count

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._num_streams += 1
        return self._num_streams - 1

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._entries.append(_StepBegins())

    def end(self) -> None:
        """Let nothing count that is recorded from now on."""
        self._end = len(self._entries)
        self.begin_step()  # so that no kernel is added to the last one

    def work(self, key: Key, amount: float) -> None:
        """Record a kernel on the current stream."""
        last = self._entries[-1] if self._entries else None
        if isinstance(last, _Work) and last.stream == self.stream and last.key == key:
            self._entries[-1] = last._replace(amount=last.amount + amount)
        elif amount:
            self._entries.append(_Work(self.stream, key, amount))

    def send(self, collective: Collective) -> None:
        """Record a collective on the current stream."""
        self._entries.append(_Sent(self.stream, collective))

    def send_beside(self, collective: Collective, group: object) -> None:
        """Record a collective of a rank without streams: those of a group follow each other."""
        if group not in self._wires:
            self._wires[group] = self.new_stream()
        wire = self._wires[group]
        self.wait(self.record(), stream=wire)
        self._entries.append(_Sent(wire, collective))
        self.sent = self.record(stream=wire)

    def record(self, *, stream: int | None = None) -> int:
        """Return an event after what was queued on a stream; None: on the current one."""
        self._num_events += 1
        self._entries.append(_Recorded(self.stream if stream is None else stream, self._num_events))
        return self._num_events

    def wait(self, event: int, *, stream: int | None = None) -> None:
        """Let a stream wait for an event; None: the current one."""
        self._entries.append(_Waited(self.stream if stream is None else stream, event))

    def collectives(self) -> list[Collective]:
        """Return the collectives of the last step, in order."""
        found: list[Collective] = []
        for entry in self._entries[: self._end]:
            if isinstance(entry, _StepBegins):
                found.clear()
            elif isinstance(entry, _Sent):
                found.append(entry.collective)
        return found

    def play(self, profile: Profile, *, slower: float = 0.0) -> StepTime:
        """Return when the last step ends. ``slower`` is by how much of the spread, -1 to 1."""
        playing = _Playing(profile, slower)
        for entry in self._entries[: self._end]:
            playing.go_on(entry)
        return playing.step()


# --- how fast it is ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """A network between ranks. A collective of ``S`` ranks takes ``(S - 1) * latency``, an
    all-reduce twice that, and the time of the bytes that a rank sends.

    Attributes:
        bytes_per_second: That a rank sends.
        latency: Of a hop from rank to rank, in seconds.
        spread: How far measured collectives were from this, as a fraction of their time.
    """

    bytes_per_second: float
    latency: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.latency >= 0 and self.spread >= 0):
            raise ValueError(f"a link has a bandwidth, and nothing below zero, got {self}.")

    def seconds(self, collective: Collective) -> float:
        """Return how long a collective takes that nothing delays."""
        sending = collective.wire_bytes / self.bytes_per_second
        return collective.hops * self.latency + sending


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """The compute of one phase of one unit, in a step."""

    phase: str
    unit: str
    seconds: float
    work: float  # in bytes: see the top of this file

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.work >= 0):
            raise ValueError(f"work and its seconds are not below zero, got {self}.")


def _family(unit: str) -> str:
    """Return what is common to the names of equal units, such as layers."""
    return re.sub(r"\d+", "*", unit)


@dataclass(frozen=True)
class Profile:
    """How fast a machine runs a job: see ``measure``.

    A field may be replaced by ``dataclasses.replace``, such as the network between nodes that was
    not there when the step was measured.

    Attributes:
        work: The compute of each phase of each unit in a step, mean over ranks.
        within_node: The network between ranks of a node; None: not known.
        between_nodes: The network between nodes; None: not known.
        steps: Seconds of each measured step.
    """

    work: list[MeasuredWork]
    within_node: Link | None = None
    between_nodes: Link | None = None
    steps: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """How far measured steps were from their median, as a fraction of it."""
        ordered = sorted(self.steps)
        if not ordered:
            return 0.0
        median = ordered[len(ordered) // 2]
        return max(median - ordered[0], ordered[-1] - median) / median

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to a file, as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """Read a file of ``save``. Raises a ValueError if it is none."""
        try:
            read = json.loads(Path(path).read_text())
            within, between = (
                None if read[name] is None else Link(**read[name])
                for name in ("within_node", "between_nodes")
            )
            work = [MeasuredWork(**each) for each in read["work"]]
            return cls(work, within, between, read["steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file that Profile.save has written.") from error

    def rates(self) -> Callable[[Key], float]:
        """Return what gives the seconds of a byte of work in a phase of a unit.

        A unit that was not measured is as fast as others of its family (``layers.0`` and
        ``layers.1``), or as the phase, or as everything.
        """
        sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for each in self.work:
            phase, unit = each.phase, each.unit
            for key in ((phase, unit), (phase, "*", _family(unit)), (phase,), ()):
                sums[key][0] += each.seconds
                sums[key][1] += each.work

        def rate(key: Key) -> float:
            phase, unit = key
            for candidate in (key, (phase, "*", _family(unit)), (phase,), ()):
                if candidate in sums and sums[candidate][1]:
                    return sums[candidate][0] / sums[candidate][1]
            return 0.0

        return rate

    def link_of(self, collective: Collective) -> Link:
        """Return the network that a collective uses. Raises a ValueError if it was not measured."""
        name = "between_nodes" if collective.is_between_nodes else "within_node"
        link: Link | None = getattr(self, name)
        if link is None:
            raise ValueError(
                f"the profile has no {name}, and the plan sends {collective.op} of "
                f"{collective.unit or '(root)'} there. Measure on such ranks, or state it: "
                f"dataclasses.replace(profile, {name}=Link(bytes_per_second=50e9, latency=5e-6))."
            )
        return link


# --- what it comes to -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KindTime:
    """All collectives of one kind in a step.

    Attributes:
        seconds: For which they run.
        exposed: For which compute waits for them.
    """

    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a planned step takes.

    Attributes:
        seconds: Of the step, as the profile says.
        low: If everything is faster by as much as measured steps were from their median at most.
        high: If everything is slower by as much.
        compute: Seconds for which compute runs.
        phases: Seconds of each phase, as in the summary of ``meshard.trace``; ``"other"`` is what
            runs outside of units.
        kinds: The collectives, by kind.
        longest_wait: The longest wait of compute, in seconds.
        longest_unit: For which collective of which unit, as ``"all_gather layers.0"``.
    """

    seconds: float
    low: float
    high: float
    compute: float
    phases: dict[str, float]
    kinds: dict[str, KindTime]
    longest_wait: float
    longest_unit: str

    @property
    def exposed(self) -> float:
        """Seconds for which compute waits for communication."""
        return sum(each.exposed for each in self.kinds.values())


def time_of(tape: Tape, profile: Profile) -> StepTime:
    """Return how long the last step on a tape takes."""
    low, middle, high = (tape.play(profile, slower=each) for each in (-1.0, 0.0, 1.0))
    return dataclasses.replace(middle, low=low.seconds, high=high.seconds)


class _Playing:
    """Where each stream is, in seconds, while a tape is played."""

    def __init__(self, profile: Profile, slower: float) -> None:
        self._profile, self._slower = profile, slower
        self._rate = profile.rates()
        self._now: defaultdict[int, float] = defaultdict(float)  # by stream
        self._last: dict[int, tuple[str, str]] = {}  # the last collective of each stream
        self._events: dict[int, tuple[float, tuple[str, str]]] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._began = self._now[0]
        self._compute = 0.0
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._sent: defaultdict[str, float] = defaultdict(float)
        self._waited: defaultdict[str, float] = defaultdict(float)
        self._longest = 0.0, ""

    def go_on(self, entry: NamedTuple) -> None:
        """Play one entry."""
        match entry:
            case _Work(stream, key, amount):
                seconds = amount * self._rate(key) * self._factor(self._profile.spread)
                self._now[stream] += seconds
                self._phases[key[0] or "other"] += seconds
                if stream == 0:
                    self._compute += seconds
            case _Sent(stream, collective):
                link = self._profile.link_of(collective)
                seconds = link.seconds(collective) * self._factor(link.spread)
                self._last[stream] = collective.op, collective.unit
                self._sent[collective.op] += seconds
                if stream == 0:
                    self._wait(self._now[0] + seconds, self._last[0])
                else:
                    self._now[stream] += seconds
            case _Recorded(stream, event):
                self._events[event] = self._now[stream], self._last.get(stream, ("copy", ""))
            case _Waited(stream, event):
                until, what = self._events[event]
                if stream == 0:
                    self._wait(until, what)
                else:
                    self._now[stream] = max(self._now[stream], until)
            case _StepBegins():
                self._begin_step()

    def _factor(self, spread: float) -> float:
        return max(0.0, 1 + self._slower * spread)

    def _wait(self, until: float, what: tuple[str, str]) -> None:
        """Let compute wait."""
        seconds = until - self._now[0]
        if seconds > 0:
            self._now[0] = until
            self._waited[what[0]] += seconds
            self._longest = max(self._longest, (seconds, " ".join(what).strip()))

    def step(self) -> StepTime:
        """Return the time of the step that was begun last."""
        seconds = self._now[0] - self._began
        kinds = {
            op: KindTime(self._sent[op], self._waited[op])
            for op in sorted({*self._sent, *self._waited})
        }
        phases = dict(self._phases)
        return StepTime(seconds, seconds, seconds, self._compute, phases, kinds, *self._longest)
