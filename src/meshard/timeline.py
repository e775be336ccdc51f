"""Timelines of steps, from files of torch.profiler: what was hidden, and what waited for what.

Ranges of the host say what was issued (``meshard::all_gather layers.0``) and for what compute
waited (``meshard::wait all_gather layers.0``). Marks such as ``meshard::forward layers.0`` say what
compute does until the next mark. What a device or a thread of gloo has recorded counts instead.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from meshard.diagnostics import aligned

_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "other collectives")
_LANES = ("compute", *_COLLECTIVES, "optimizer", "offload")  # from top to bottom
_LOCAL = {"optimizer": "optimizer", "copy_to_device": "offload", "copy_to_host": "offload"}
_IN_COMPUTE = ("copy_out", "reduce", "comm_hook")  # ranges without a lane of their own
_PHASES = ("forward", "recompute", "backward", "outside")
_CLOSE = 20.0  # microseconds: kernels closer than that are shown as one

Event = Mapping[str, Any]
# The moment since which compute does something else, its phase ("optimizer" too), and the name of
# the unit or optimizer.
Mark = tuple[float, str, str]


@dataclass(slots=True)
class Span:
    """What a rank did in a lane."""

    lane: str
    category: str  # which decides the colour
    name: str
    began: float
    ended: float

    @property
    def length(self) -> float:
        """Its microseconds."""
        return self.ended - self.began


@dataclass(slots=True)
class Collective(Span):
    """A collective on one rank. ``name`` is that of the unit."""

    ranks: tuple[int, ...] = ()  # that take part; empty: all
    stream: Any = None  # of a device
    waits: list[Span] = field(default_factory=list)  # of compute
    last_rank: int = -1  # the one that came last
    late: float = 0.0  # for how long compute waited until that one came

    @property
    def exposed(self) -> float:
        """For how many microseconds compute waited."""
        return sum(each.length for each in self.waits)


@dataclass(slots=True)
class Timeline:
    """What one rank did."""

    rank: int
    collectives: list[Collective]
    spans: list[Span]  # of compute, optimizers and copies

    def all(self) -> list[Span]:
        """Return the spans of all lanes, with the waits of compute, in order."""
        waits = [wait for each in self.collectives for wait in each.waits]
        return sorted([*self.collectives, *self.spans, *waits], key=attrgetter("began"))

    def shift(self, by: float) -> None:
        """Move all that the rank did by some microseconds."""
        for span in self.all():
            span.began, span.ended = span.began + by, span.ended + by


# --- files ------------------------------------------------------------------------------------


def read(paths: Sequence[str | os.PathLike[str]]) -> list[Timeline]:
    """Read files of torch.profiler, one of each rank, and find out who waited for whom.

    Raises:
        ValueError: A file is none of torch.profiler, shows nothing of meshard, or is of a rank of
            which there is another one.
    """
    timelines = sorted(map(_read, paths, itertools.count()), key=attrgetter("rank"))
    for before, other in itertools.pairwise(timelines):
        if before.rank == other.rank:
            raise ValueError(f"two of the files are of rank {other.rank}.")
        other.shift(_clock_offset(timelines[0], other))
    for same in _matched(timelines):
        last = max(same, key=lambda rank: same[rank].began)
        for one in same.values():
            late = (min(wait.ended, same[last].began) - wait.began for wait in one.waits)
            one.last_rank, one.late = last, sum(each for each in late if each > 0)
            if 2 * one.late > one.exposed:
                for wait in one.waits:
                    wait.name += f", rank {last} late"
    zero = min(timeline.all()[0].began for timeline in timelines)
    for timeline in timelines:
        timeline.shift(-zero)
    return timelines


def _read(path: str | os.PathLike[str], number: int) -> Timeline:
    try:
        with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
            content = json.load(file)
        events = [each for each in content["traceEvents"] if each["ph"] == "X"]
        rank = content.get("distributedInfo", {}).get("rank", number)
        found = _timeline(sorted(events, key=itemgetter("ts")), rank)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of torch.profiler's export_chrome_trace.") from error
    if not found.collectives:
        raise ValueError(f"{path} shows no collective of meshard.")
    return found


def _matched(timelines: Iterable[Timeline]) -> Iterator[dict[int, Collective]]:
    """Iterate over the collectives that several ranks have recorded, each by rank."""
    found: defaultdict[Any, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        for each in timeline.collectives:
            found[each.lane, each.name, each.ranks][timeline.rank].append(each)
    for by_rank in found.values():
        if len(by_rank) > 1 and len(set(map(len, by_rank.values()))) == 1:
            for same in zip(*by_rank.values(), strict=True):
                yield dict(zip(by_rank, same, strict=True))


def _clock_offset(ours: Timeline, theirs: Timeline) -> float:
    """Return what to add to the clock of another rank. On one host it is zero.

    No rank leaves a collective before all have begun it. So each one gives two bounds.
    """
    low, high = float("-inf"), float("inf")
    for same in _matched([ours, theirs]):
        our, their = same.values()
        if our.lane != "other collectives" and our.waits and their.waits:
            low, high = max(low, our.began - their.ended), min(high, our.ended - their.began)
    return min(max(0.0, low), high)


# --- one rank ---------------------------------------------------------------------------------


def _lane_of(kind: str) -> str:
    lane = kind.replace("_", "-")
    return lane if lane in _COLLECTIVES else "other collectives"


def _times(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _computed(phase: str, name: str, began: float, ended: float) -> Span:
    return Span("optimizer" if phase == "optimizer" else "compute", phase, name, began, ended)


def _timeline(events: Sequence[Event], rank: int) -> Timeline:
    """Return what one rank did, from events in the order of their beginnings."""
    by_category: defaultdict[str, list[Event]] = defaultdict(list)
    for each in events:
        by_category[each.get("cat", "")].append(each)
    on_device: defaultdict[str, deque[Event]] = defaultdict(deque)  # by the name of the range
    for each in by_category["gpu_user_annotation"]:
        on_device[each["name"]].append(each)
    collectives: list[Collective] = []
    spans: list[Span] = []
    marks: list[Mark] = [(float("-inf"), "outside", "")]
    step_ended = float("-inf")
    for each in by_category["user_annotation"]:
        source, _, title = each["name"].partition("::")
        what, _, name = title.partition(" ")
        began, ended = _times(each)
        found = on_device[each["name"]]
        shown = found.popleft() if found else each
        if source.startswith("Optimizer.step#") and began >= step_ended:  # in no other step
            optimizer = source.partition("#")[2].partition(".")[0]
            marks += [(began, "optimizer", optimizer), (ended, *marks[-1][1:])]
            step_ended = ended
        elif source != "meshard" or what in _IN_COMPUTE:
            continue
        elif what in _PHASES:
            marks.append((began, what, name))
        elif what == "ranks":
            collectives[-1].ranks = tuple(map(int, name.split(",")))
        elif what == "wait":
            kind, _, unit = name.partition(" ")
            same = [c for c in collectives if (c.lane, c.name) == (_lane_of(kind), unit)]
            if same:  # else it began before the profiler
                one = next((c for c in same if not c.waits), same[-1])
                one.waits.append(Span("compute", "exposed wait", unit, began, ended))
        elif what in _LOCAL:
            spans.append(Span(_LOCAL[what], what.replace("_", " "), name, *_times(shown)))
        else:
            stream = None if shown is each else shown["tid"]
            one = Collective(_lane_of(what), "communication", name, *_times(shown), stream=stream)
            collectives.append(one)
    marks.sort(key=itemgetter(0))  # a closure runs units inside of a step
    _end_on_cpu([each for each in collectives if each.stream is None], by_category)
    if by_category["kernel"]:
        spans += _compute_on_device(by_category, collectives, marks)
    else:
        spans += _compute_on_cpu(collectives, marks, spans)
    return Timeline(rank, collectives, spans)


def _end_on_cpu(collectives: Iterable[Collective], by_category: Mapping[str, list[Event]]) -> None:
    """Find out when collectives of the host have ended. gloo records what its threads do."""
    by_gloo: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
    for each in by_category["user_annotation"]:
        by_gloo[each["name"]].append(_times(each))
    for one in collectives:
        if not one.waits:
            one.waits.append(_blocked_by(one))
            continue
        # On CPU, what is sent for a reduce-scatter is an all-to-all.
        name = one.lane.replace("reduce-scatter", "all-to-all").replace("-", "_")
        ran, one.ended = by_gloo[f"gloo:{name}"], one.waits[-1].ended
        while ran and ran[0][0] < one.began:
            ran.popleft()
        if ran and ran[0][0] < one.ended:
            one.ended = min(one.ended, ran.popleft()[1])


def _blocked_by(one: Collective) -> Span:
    return Span("compute", "exposed wait", one.name, one.began, one.ended)


def _compute_on_cpu(
    collectives: Iterable[Collective], marks: Sequence[Mark], spans: Iterable[Span]
) -> Iterator[Span]:
    """Iterate over what compute did from mark to mark, where it did nothing else."""
    others = [*spans, *(wait for each in collectives for wait in each.waits)]
    busy = sorted((each.began, each.ended) for each in others)
    for (began, phase, name), (until, _, _) in itertools.pairwise(marks):
        first, last = (bisect.bisect_left(busy, (moment,)) for moment in (began, until))
        for start, end in [*busy[first:last], (until, until)]:
            if began < start and phase != "outside":
                yield _computed(phase, name, began, start)
            began = max(began, end)


def _compute_on_device(
    by_category: Mapping[str, list[Event]], collectives: Iterable[Collective], marks: Sequence[Mark]
) -> Iterator[Span]:
    """Iterate over what the stream of compute did, and find out for how long it waited."""
    sending = {each.stream for each in collectives if each.waits}
    busy = defaultdict[Any, float](float)
    for each in by_category["kernel"]:
        busy[each["tid"]] += 0 if each["tid"] in sending else each["dur"]
    compute = max(busy, key=busy.__getitem__)
    launched: dict[Any, float] = {
        each["args"]["correlation"]: each["ts"]
        for category, some in by_category.items()
        if category.endswith(("_runtime", "_driver"))
        for each in some
        if "correlation" in each.get("args", ())
    }
    kernels: list[tuple[float, float, float]] = sorted(
        (launched.get(each["args"].get("correlation"), float(each["ts"])), *_times(each))
        for each in by_category["kernel"]
        if each["tid"] == compute
    )

    def idle_since(moment: float) -> float:
        """Return when all has ended that the host launched before ``moment``."""
        number = bisect.bisect_left(kernels, (moment,))
        return max(moment, kernels[number - 1][2]) if number else moment

    for one in collectives:
        if one.stream == compute:
            one.waits = [_blocked_by(one)]
        elif one.stream is not None:
            for wait in one.waits:
                wait.began, wait.ended = idle_since(wait.began), one.ended
            one.waits = [wait for wait in one.waits if wait.began < wait.ended]
    shown = _computed("outside", "", 0.0, 0.0)
    for moment, began, ended in kernels:
        _, phase, name = marks[bisect.bisect_right(marks, moment, key=itemgetter(0)) - 1]
        is_same = (phase, name) == (shown.category, shown.name)
        if is_same and began - shown.ended < _CLOSE:
            shown.ended = ended
        else:
            shown = _computed(phase, name, began, ended)
            yield shown


# --- the summary ------------------------------------------------------------------------------


def summary_of(timeline: Timeline) -> str:
    """Return what one rank did, as a table."""
    spans, took = timeline.all(), defaultdict[str, float](float)
    for span in spans:
        took[span.category] += span.length
    phases = ("forward", "recompute", "backward", "optimizer")
    parts = [f"{each} {_short(took[each])}" for each in phases if took[each]]
    parts.append(f"waits for communication {_short(took['exposed wait'])}")
    recorded = _short(max(each.ended for each in spans) - spans[0].began)
    rows: list[tuple[str, ...]] = [
        ("communication", "count", "time", "exposed", "hidden", "longest wait")
    ]
    for lane in _COLLECTIVES:
        some = [each for each in timeline.collectives if each.lane == lane]
        if some:
            time, exposed = (sum(each.length for each in some), sum(each.exposed for each in some))
            longest = max(some, key=attrgetter("exposed"))
            wait = f"{_short(longest.exposed)} for {longest.name}" if longest.exposed else "-"
            hidden = f"{max(0.0, 1 - exposed / time):.0%}"
            rows.append((lane, str(len(some)), _short(time), _short(exposed), hidden, wait))
    lines = [f"rank {timeline.rank}: {recorded} recorded: {', '.join(parts)}", *aligned(rows)]
    for rank in sorted({each.last_rank for each in timeline.collectives if each.late}):
        some = [each for each in timeline.collectives if each.last_rank == rank]
        worst = max(some, key=attrgetter("late"))
        lines.append(
            f"waited {_short(sum(each.late for each in some))} until rank {rank} came, "
            f"{_short(worst.late)} of it to the {worst.lane} of {worst.name}"
        )
    return "\n".join(lines)


def _short(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1e7 else f"{microseconds / 1e3:.1f} ms"


# --- the picture ------------------------------------------------------------------------------

_COLOURS = {
    "forward": "#4e79a7",
    "backward": "#76b7b2",
    "recompute": "#a0cbe8",
    "exposed wait": "#e15759",
    "communication": "#f1a340",
    "optimizer": "#59a14f",
    "copy to device": "#b07aa1",
    "copy to host": "#d4a6c8",
}
_WIDTH = 14.0  # inches
_CHARACTER = 0.075  # inches per character of a label


def draw(timelines: Sequence[Timeline], output: str | os.PathLike[str]) -> None:
    """Draw the lanes of each rank into a file of a type that matplotlib writes."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    tracks = [_tracks(each) for each in timelines]
    heights = [0.3 * len(each) + 0.5 for each in tracks]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.2), layout="constrained")
    plots = figure.subplots(len(tracks), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    last = max(each.ended for timeline in timelines for each in timeline.all()) / 1000
    legend = {}
    for timeline, lanes, plot in zip(timelines, tracks, plots, strict=True):
        plot.set_title(f"rank {timeline.rank}", loc="left", fontsize=10)
        plot.set_yticks(range(len(lanes)), list(lanes), fontsize=8)
        plot.set_ylim(len(lanes) - 0.5, -0.5)
        for row, spans in enumerate(lanes.values()):
            for category, colour in _COLOURS.items():
                some = [each for each in spans if each.category == category]
                if some:
                    ranges = [(each.began / 1000, each.length / 1000) for each in some]
                    legend[category] = plot.broken_barh(
                        ranges, (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3
                    )
            for each in spans:
                room = (each.length / 1000 / last * (_WIDTH - 2.5) - 0.06) / _CHARACTER
                names = each.name, each.name.partition(",")[0]
                text = next((name for name in names if len(name) < room), "")
                middle = (each.began + each.ended) / 2000
                plot.text(middle, row, text, ha="center", va="center", fontsize=7)
    plots[-1].set_xlabel("milliseconds")
    plots[-1].set_xlim(0, last)
    figure.legend(
        legend.values(), legend, loc="outside upper center", ncols=len(legend), fontsize=8
    )
    figure.savefig(output, dpi=110)


def _tracks(timeline: Timeline) -> dict[str, list[Span]]:
    """Return the spans by lane. What overlaps gets lanes of its own."""
    found: dict[str, list[Span]] = {}
    for span in sorted(timeline.all(), key=lambda each: _LANES.index(each.lane)):
        for number in itertools.count(1):
            track = found.setdefault(f"{span.lane} {number}" if number > 1 else span.lane, [])
            if not track or track[-1].ended <= span.began:
                track.append(span)
                break
    return found
