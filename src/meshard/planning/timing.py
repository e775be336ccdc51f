"""How long a planned step takes: what it queues, and how fast a profile says that is.

A profile of a real step says how many seconds a byte of work takes in each phase of each unit, and
how fast each network is. Playing a tape then tells when everything ends, and who waits for what.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from meshard.planning.tape import (
    Collective,
    Entry,
    Key,
    Recorded,
    Sent,
    StepBegins,
    Tape,
    Waited,
    Work,
)


@dataclass(frozen=True, slots=True)
class Link:
    """A network between ranks.

    A collective of ``S`` ranks takes as long as the bytes that a rank sends, and ``S - 1``
    latencies more (an all-reduce twice as many).

    Attributes:
        bytes_per_second: How many bytes a rank sends in a second.
        latency: Seconds of a hop from rank to rank.
        spread: By which fraction the median collective took more or less time than this says.
    """

    bytes_per_second: float
    latency: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.latency >= 0 and self.spread >= 0):
            raise ValueError(
                f"bytes_per_second is above zero, latency and spread not below it, got {self}."
            )

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
    work: float  # in bytes: see tape.py

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.work >= 0):
            raise ValueError(f"seconds and work are not below zero, got {self}.")


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
        device_type: Of the ranks that were measured, such as ``"cuda"``; "": not known.
    """

    work: list[MeasuredWork]
    within_node: Link | None = None
    between_nodes: Link | None = None
    steps: list[float] = field(default_factory=list)
    device_type: str = ""

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
            return cls(work, within, between, read["steps"], read["device_type"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file that Profile.save has written.") from error

    def rates(self) -> Callable[[Key], float]:
        """Return a function from a phase and a unit to the seconds that a byte of work takes there.

        A unit that was not measured is as fast as its family (``layers.1`` as ``layers.0``). If
        there is none, it is as fast as all units in this phase, or else in all phases.
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
                f"dataclasses.replace(profile, {name}=Link(bytes_per_second=50e9, latency=5e-6)), "
                f"or --{name.partition('_')[0]} 50GB/s,5us in the shell."
            )
        return link


# --- what it comes to -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KindTime:
    """All collectives of one kind in a step.

    Attributes:
        seconds: How long they run, added up.
        exposed: How long compute waits for them.
    """

    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a planned step takes.

    Attributes:
        seconds: Of the step.
        low: Seconds of the step if compute and networks are faster by the spreads of the profile.
        high: Seconds of the step if they are slower by these spreads.
        compute: Seconds in which compute runs.
        phases: Seconds of each phase, as in the summary of ``meshard.trace``; ``"other"`` is what
            runs outside of units.
        kinds: The collectives, by kind.
        longest_wait: The longest wait of compute, in seconds.
        longest_unit: What that wait was for, as in ``"all_gather layers.0"``.
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
        """Seconds in which compute waits for communication."""
        return sum(each.exposed for each in self.kinds.values())


def time_of(tape: Tape, profile: Profile) -> StepTime:
    """Return how long the last step on a tape takes."""
    low, middle, high = (_play(tape, profile, slower=each) for each in (-1.0, 0.0, 1.0))
    return dataclasses.replace(middle, low=low.seconds, high=high.seconds)


def _play(tape: Tape, profile: Profile, *, slower: float) -> StepTime:
    """Return the time of the last step if all is ``slower`` times its spread slower."""
    playing = _Playing(profile, slower)
    for entry in tape.entries():
        playing.go_on(entry)
    return playing.step()


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

    def go_on(self, entry: Entry) -> None:
        """Play one entry."""
        match entry:
            case Work(stream, key, amount):
                seconds = amount * self._rate(key) * self._factor(self._profile.spread)
                self._now[stream] += seconds
                self._phases[key[0] or "other"] += seconds
                if stream == 0:
                    self._compute += seconds
            case Sent(stream, collective):
                link = self._profile.link_of(collective)
                seconds = link.seconds(collective) * self._factor(link.spread)
                self._last[stream] = collective.op, collective.unit
                self._sent[collective.op] += seconds
                if stream == 0:
                    self._wait(self._now[0] + seconds, self._last[0])
                else:
                    self._now[stream] += seconds
            case Recorded(stream, event):
                self._events[event] = self._now[stream], self._last.get(stream, ("copy", ""))
            case Waited(stream, event):
                until, what = self._events[event]
                if stream == 0:
                    self._wait(until, what)
                else:
                    self._now[stream] = max(self._now[stream], until)
            case StepBegins():
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
