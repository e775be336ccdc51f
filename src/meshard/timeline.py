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
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

from meshard.diagnostics import aligned

# From top to bottom.
LANES = (
    "compute",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "other collectives",
    "optimizer",
    "offload",
)
_LOCAL = {"optimizer": "optimizer", "copy_to_device": "offload", "copy_to_host": "offload"}
_IN_COMPUTE = ("copy_out", "reduce", "comm_hook")  # ranges without a lane of their own
_PHASES = ("forward", "recompute", "backward", "outside")
_CLOSE = 20.0  # microseconds: kernels closer than that are shown as one

Interval = tuple[float, float]  # microseconds
Event = Mapping[str, Any]


@dataclass(slots=True)
class Span:
    """What a rank did in a lane."""

    lane: str
    category: str  # which decides the colour
    name: str
    began: float
    ended: float


@dataclass(slots=True)
class Collective(Span):
    """A collective on one rank. ``name`` is that of the unit."""

    ranks: tuple[int, ...] = ()  # that take part; empty: all
    stream: Any = None  # of a device
    waits: list[Interval] = field(default_factory=list)  # of compute
    last_rank: int = -1  # the one that came last
    late: float = 0.0  # for how long compute waited until that one came

    @property
    def exposed(self) -> float:
        """For how long compute waited."""
        return sum(ended - began for began, ended in self.waits)


@dataclass(slots=True)
class Timeline:
    """What one rank did."""

    rank: int
    collectives: list[Collective]
    spans: list[Span]  # of compute, optimizers and copies

    def all(self) -> list[Span]:
        """Return the spans of all lanes, with the waits of compute."""
        waits = [
            Span("compute", "wait", each.name, *wait)
            for each in self.collectives
            for wait in each.waits
        ]
        return sorted([*self.collectives, *self.spans, *waits], key=lambda each: each.began)

    def shift(self, by: float) -> None:
        """Move all that the rank did by some microseconds."""
        for span in (*self.collectives, *self.spans):
            span.began, span.ended = span.began + by, span.ended + by
        for each in self.collectives:
            each.waits = [(began + by, ended + by) for began, ended in each.waits]


# --- files ------------------------------------------------------------------------------------


def read(paths: Sequence[str | os.PathLike[str]]) -> list[Timeline]:
    """Read files of torch.profiler, one of each rank, and find out who waited for whom.

    Raises:
        ValueError: A file is none of torch.profiler, shows nothing of meshard, or is of a rank of
            which there is another one.
    """
    timelines = sorted(map(_read, paths, itertools.count()), key=lambda each: each.rank)
    for one, other in itertools.pairwise(timelines):
        if one.rank == other.rank:
            raise ValueError(f"two of the files are of rank {one.rank}.")
    for other in timelines[1:]:
        other.shift(_clock_offset(timelines[0], other))
    for same in _matched(timelines):
        last = max(same, key=lambda rank: same[rank].began)
        for each in same.values():
            late = (min(ended, same[last].began) - began for began, ended in each.waits)
            each.last_rank, each.late = last, sum(one for one in late if one > 0)
    zero = min(span.began for each in timelines for span in each.all())
    for each in timelines:
        each.shift(-zero)
    return timelines


def _read(path: str | os.PathLike[str], number: int) -> Timeline:
    try:
        with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
            content = json.load(file)
        events = [each for each in content["traceEvents"] if each["ph"] == "X"]
        rank = content.get("distributedInfo", {}).get("rank", number)
        found = _timeline(sorted(events, key=lambda each: float(each["ts"])), rank)
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
        if len(by_rank) > 1 and len({len(some) for some in by_rank.values()}) == 1:
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
    return lane if lane in LANES else "other collectives"


def _times(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"] + event["dur"])


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
    steps: list[Span] = []
    marks = [_Mark(float("-inf"), "outside", "")]
    for each in by_category["user_annotation"]:
        source, _, title = each["name"].partition("#" if "#" in each["name"] else "::")
        what, _, name = title.partition(" ")
        if source == "Optimizer.step":
            if not steps or steps[-1].ended <= each["ts"]:  # else it is inside of another one
                name = title.partition(".")[0]
                steps.append(Span("optimizer", "optimizer", name, *_times(each)))
        elif source != "meshard" or what in _IN_COMPUTE:
            continue
        elif what in _PHASES:
            marks.append(_Mark(each["ts"], what, name))
        elif what == "ranks":
            collectives[-1].ranks = tuple(map(int, name.split(",")))
        elif what == "wait":
            kind, _, unit = name.partition(" ")
            same = [c for c in collectives if (c.lane, c.name) == (_lane_of(kind), unit)]
            if same:  # else it began before the profiler
                next((c for c in same if not c.waits), same[-1]).waits.append(_times(each))
        else:
            found = on_device[each["name"]]
            shown = found.popleft() if found else each
            if what in _LOCAL:
                spans.append(Span(_LOCAL[what], what, name, *_times(shown)))
            else:
                collectives.append(
                    Collective(_lane_of(what), "communication", name, *_times(shown))
                )
                collectives[-1].stream = None if shown is each else shown["tid"]
    _end_on_cpu([each for each in collectives if each.stream is None], by_category)
    if by_category["kernel"]:
        spans += _compute_on_device(by_category, collectives, marks, steps)
    else:
        spans += steps
        spans += _compute_on_cpu(collectives, marks, spans)
    return Timeline(rank, collectives, spans)


class _Mark(NamedTuple):
    """Compute does something else from now on."""

    moment: float
    phase: str
    unit: str

    def span(self, began: float, ended: float) -> Span:
        """Return a part of what follows the mark."""
        return Span("compute", self.phase, self.unit, began, ended)


def _end_on_cpu(
    collectives: Iterable[Collective], by_category: Mapping[str, Sequence[Event]]
) -> None:
    """Find out when collectives of the host have ended. gloo records what its threads do."""
    by_gloo: defaultdict[str, deque[Interval]] = defaultdict(deque)
    for each in by_category["user_annotation"]:
        by_gloo[each["name"]].append(_times(each))
    for one in collectives:
        if not one.waits:
            one.waits.append((one.began, one.ended))  # the call has blocked
            continue
        # On CPU, what is sent for a reduce-scatter is an all-to-all.
        name = one.lane.replace("reduce-scatter", "all-to-all").replace("-", "_")
        ran, one.ended = by_gloo[f"gloo:{name}"], one.waits[-1][1]
        while ran and ran[0][0] < one.began:
            ran.popleft()
        if ran and ran[0][0] < one.ended:
            one.ended = min(one.ended, ran.popleft()[1])


def _compute_on_cpu(
    collectives: Iterable[Collective], marks: Sequence[_Mark], spans: Iterable[Span]
) -> Iterator[Span]:
    """Iterate over what compute did from mark to mark, where it did nothing else."""
    busy = [(each.began, each.ended) for each in spans]
    busy = sorted([*busy, *(wait for each in collectives for wait in each.waits)])
    for mark, (until, _, _) in itertools.pairwise(marks):
        began = mark.moment
        first, last = (bisect.bisect_left(busy, (moment,)) for moment in (began, until))
        for start, end in [*busy[first:last], (until, until)]:
            if began < start and mark.phase != "outside":
                yield mark.span(began, start)
            began = max(began, end)


def _compute_on_device(
    by_category: Mapping[str, Sequence[Event]],
    collectives: Iterable[Collective],
    marks: Sequence[_Mark],
    steps: Sequence[Span],
) -> Iterator[Span]:
    """Iterate over what the stream of compute did, and find out for how long it waited."""
    sending = {each.stream for each in collectives if each.waits}
    busy = Counter[Any]()
    for each in by_category["kernel"]:
        busy[each["tid"]] += 0 if each["tid"] in sending else each["dur"]
    ((compute, _),) = busy.most_common(1)
    launched = {
        each["args"]["correlation"]: float(each["ts"])
        for category, some in by_category.items()
        if category.endswith(("_runtime", "_driver"))
        for each in some
        if "correlation" in each.get("args", ())
    }
    kernels = sorted(
        (launched.get(each["args"].get("correlation"), float(each["ts"])), *_times(each))
        for each in by_category["kernel"]
        if each["tid"] == compute
    )
    for one in collectives:
        if one.stream == compute:
            one.waits = [(one.began, one.ended)]
        elif one.stream is not None:
            # Compute waits once it has done what the host had launched before.
            asked = [begin for begin, _ in one.waits]
            done = [kernels[: bisect.bisect_left(kernels, (each,))][-1:] for each in asked]
            starts = [max([begin, *(k[2] for k in some)]) for begin, some in zip(asked, done)]
            one.waits = [(start, one.ended) for start in starts if start < one.ended]
    shown: Span | None = None
    for moment, began, ended in kernels:
        mark = marks[bisect.bisect_right(marks, moment, key=itemgetter(0)) - 1]
        step = next((each for each in steps if each.began <= moment < each.ended), None)
        span = mark.span(began, ended) if step is None else replace(step, began=began, ended=ended)
        if shown is not None and began - shown.ended < _CLOSE and _is_same(shown, span):
            shown.ended = ended
            continue
        shown = span
        yield span


def _is_same(one: Span, other: Span) -> bool:
    return (one.lane, one.category, one.name) == (other.lane, other.category, other.name)


# --- the summary ------------------------------------------------------------------------------


def summary_of(timeline: Timeline) -> str:
    """Return what one rank did, as a table."""
    spans = timeline.all()
    took = Counter[str]()
    for each in spans:
        took[each.category] += each.ended - each.began
    phases = ("forward", "recompute", "backward", "optimizer")
    parts = [f"{each} {_short(took[each])}" for each in phases if took[each]]
    seconds = max(each.ended for each in spans) - spans[0].began
    head = f"rank {timeline.rank}: {_short(seconds)}: {', '.join(parts)}"
    rows = [("communication", "count", "time", "exposed", "hidden", "longest wait")]
    for lane in LANES:
        some = [each for each in timeline.collectives if each.lane == lane]
        if some:
            time, exposed = (sum(map(get, some)) for get in (_length, _exposed))
            longest = max(some, key=_exposed)
            wait = f"{_short(longest.exposed)} for {longest.name}" if longest.exposed else "-"
            hidden = f"{max(0.0, 1 - exposed / time):.0%}"
            rows.append((lane, str(len(some)), _short(time), _short(exposed), hidden, wait))
    lines = [head, *aligned(rows), f"waits for communication: {_short(took['wait'])}"]
    by_rank: defaultdict[int, list[Collective]] = defaultdict(list)
    for each in timeline.collectives:
        if each.late:
            by_rank[each.last_rank].append(each)
    for rank, some in sorted(by_rank.items()):
        worst = max(some, key=lambda each: each.late)
        lines.append(
            f"  {_short(sum(each.late for each in some))} until rank {rank} came, at most "
            f"{_short(worst.late)} to the {worst.lane} of {worst.name}"
        )
    return "\n".join(lines)


def _length(one: Span) -> float:
    return one.ended - one.began


def _exposed(one: Collective) -> float:
    return one.exposed


def _short(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1e7 else f"{microseconds / 1e3:.1f} ms"


# --- the picture ------------------------------------------------------------------------------

_COLOURS = {
    "forward": "#4e79a7",
    "backward": "#76b7b2",
    "recompute": "#a0cbe8",
    "wait": "#e15759",
    "communication": "#f1a340",
    "optimizer": "#59a14f",
    "copy_to_device": "#b07aa1",
    "copy_to_host": "#d4a6c8",
}
_WIDTH = 14.0  # inches
_CHARACTER = 0.075  # inches per character of a label


def draw(timelines: Sequence[Timeline], output: str | os.PathLike[str]) -> None:
    """Draw the lanes of each rank into a file of a type that matplotlib writes.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # an extra
        from matplotlib.patches import Patch  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib (pip install matplotlib); without -o the summary is "
            "printed, and https://ui.perfetto.dev opens the files."
        ) from error
    tracks = [_tracks(each) for each in timelines]
    heights = [0.3 * len(each) + 0.5 for each in tracks]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.2), layout="constrained")
    plots = figure.subplots(len(tracks), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    last = max(each.ended for timeline in timelines for each in timeline.all()) / 1000
    seen = set()
    for timeline, lanes, plot in zip(timelines, tracks, plots, strict=True):
        plot.set_title(f"rank {timeline.rank}", loc="left", fontsize=10)
        plot.set_yticks(range(len(lanes)), list(lanes), fontsize=8)
        plot.set_ylim(len(lanes) - 0.5, -0.5)
        for row, spans in enumerate(lanes.values()):
            for category in _COLOURS:
                some = [each for each in spans if each.category == category]
                seen |= {each.category for each in some}
                ranges = [(each.began / 1000, _length(each) / 1000) for each in some]
                colour = _COLOURS[category]
                plot.broken_barh(
                    ranges, (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3
                )
                for (began, length), each in zip(ranges, some, strict=True):
                    if length / last * (_WIDTH - 2.5) > _CHARACTER * len(each.name) + 0.06:
                        at = began + length / 2, row
                        plot.text(*at, each.name, ha="center", va="center", fontsize=7)
    plots[-1].set_xlabel("milliseconds")
    plots[-1].set_xlim(0, last)
    patches = [
        Patch(color=colour, label="exposed wait" if each == "wait" else each.replace("_", " "))
        for each, colour in _COLOURS.items()
        if each in seen
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
    figure.savefig(output, dpi=110)


def _tracks(timeline: Timeline) -> dict[str, list[Span]]:
    """Return the spans by lane. What overlaps gets lanes of its own."""
    found: dict[str, list[Span]] = {}
    for span in sorted(timeline.all(), key=lambda each: LANES.index(each.lane)):
        for number in itertools.count(1):
            track = found.setdefault(f"{span.lane} {number}" if number > 1 else span.lane, [])
            if not track or track[-1].ended <= span.began:
                track.append(span)
                break
    return found
