"""Summaries and pictures of what ``meshard.trace`` has written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshard.diagnostics import aligned, readable_bytes

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
_LANE_OF = {
    "optimizer": "optimizer",
    "comm_hook": "all-reduce",
    "copy_to_device": "offload",
    "copy_to_host": "offload",
}
_SHOWN = 8  # ranks
Events = Iterable[Mapping[str, Any]]


def lane_of(what: str) -> str:
    """Return the lane of a collective, or of other work."""
    lane = _LANE_OF.get(what, what.replace("_", "-"))
    return lane if lane in LANES else "other collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """The collectives of one kind on one rank. Times are in seconds.

    Attributes:
        num_collectives: How many.
        num_bytes: Of whole buffers, as in ``CommLedger``.
        seconds: Of all collectives together, each from its start to its end.
        exposed: The part of these seconds in which compute waited.
        longest_wait: The longest time that compute waited for one collective.
        longest_unit: The unit of that collective; "" if compute never waited.
    """

    num_collectives: int
    num_bytes: int
    seconds: float
    exposed: float
    longest_wait: float
    longest_unit: str

    @property
    def hidden_share(self) -> float:
        """The part of the time that ran beside compute, from 0 to 1."""
        return 1 - self.exposed / self.seconds if self.seconds else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A trace of one rank in numbers; ``print`` gives a table. Times are in seconds.

    Attributes:
        kinds: By name: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
        phases: Seconds of ``"forward"``, ``"backward"``, ``"recompute"``, ``"optimizer"``, without
            waits.
        seconds: From the beginning to the end of the trace.
        peak_bytes: The most bytes alive at the beginning or end of a unit; None: not known.
        memory_kind: What these bytes are.
    """

    rank: int
    seconds: float
    kinds: dict[str, KindSummary]
    phases: dict[str, float]
    peak_bytes: int | None
    memory_kind: str

    @property
    def exposed(self) -> float:
        """For how long compute waited for communication."""
        return sum(kind.exposed for kind in self.kinds.values())

    @property
    def hidden_share(self) -> float:
        """The part of communication that ran beside compute, from 0 to 1."""
        seconds = sum(kind.seconds for kind in self.kinds.values())
        return 1 - self.exposed / seconds if seconds else 1.0

    def __str__(self) -> str:
        parts = [f"{name} {_short(seconds)}" for name, seconds in self.phases.items()]
        parts.append(f"waits for communication {_short(self.exposed)}")
        lines = [f"rank {self.rank}: {_short(self.seconds)} traced: {', '.join(parts)}"]
        rows = [(name, *_cells(kind)) for name, kind in self.kinds.items()]
        if rows:
            heads = ("communication", "count", "payload", "time", "exposed", "hidden")
            lines += aligned([(*heads, "longest wait"), *rows])
            lines.append(f"hidden in all: {self.hidden_share:.0%}")
        if self.peak_bytes is not None:
            lines.append(f"peak: {readable_bytes(self.peak_bytes)} ({self.memory_kind})")
        return "\n".join(lines)


def _cells(kind: KindSummary) -> tuple[str, ...]:
    longest = f"{_short(kind.longest_wait)} for {kind.longest_unit}" if kind.longest_unit else "-"
    times = _short(kind.seconds), _short(kind.exposed), f"{kind.hidden_share:.0%}"
    return str(kind.num_collectives), readable_bytes(kind.num_bytes), *times, longest


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1000 * seconds:.1f} ms"


def summarize(events: Events, rank: int, seconds: float, memory_kind: str) -> Summary:
    """Return the summary of one rank from the events of a trace."""
    own = [each for each in events if each["pid"] == rank]
    spans = [each for each in own if each["ph"] == "X"]
    kinds, phases = {}, {}
    for lane in LANES:
        members = [each for each in spans if lane_of(each["args"].get("op", "")) == lane]
        members = [each for each in members if each["cat"] == "communication"]
        waits = [each for each in spans if each["cat"] == "wait" and each["args"]["kind"] == lane]
        longest = max(waits, key=lambda wait: wait["dur"], default=None)
        if members:
            kinds[lane] = KindSummary(
                num_collectives=len(members),
                num_bytes=sum(each["args"]["bytes"] for each in members),
                seconds=sum(each["dur"] for each in members) / 1e6,
                exposed=sum(each["args"]["exposed us"] for each in members) / 1e6,
                longest_wait=longest["dur"] / 1e6 if longest else 0.0,
                longest_unit=longest["args"]["unit"] if longest else "",
            )
    for phase in ("forward", "recompute", "backward", "optimizer"):
        durations = [each["dur"] for each in spans if each["cat"] == phase]
        if durations:
            phases[phase] = sum(durations) / 1e6
    sizes = [each["args"]["bytes"] for each in own if each["ph"] == "C"]
    return Summary(
        rank=rank,
        seconds=seconds,
        kinds=kinds,
        phases=phases,
        peak_bytes=max(sizes, default=None),
        memory_kind=memory_kind,
    )


@dataclass(frozen=True, slots=True)
class Timeline:
    """A file that ``meshard.trace`` has written."""

    events: list[dict[str, Any]]
    ranks: dict[int, dict[str, Any]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a file. Raises a ValueError if ``meshard.trace`` has not written it."""
        try:
            content = json.loads(Path(path).read_text())
            ranks = {int(rank): each for rank, each in content["otherData"]["ranks"].items()}
            return cls(content["traceEvents"], ranks)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file that meshard.trace has written.") from error

    def of_ranks(self, ranks: Sequence[int] | None) -> Timeline:
        """Return a timeline of some ranks; None: of the first eight, with a line if it has more."""
        if ranks is None:
            ranks = sorted(self.ranks)[:_SHOWN]
            if len(ranks) < len(self.ranks):
                print(f"ranks 0 to {_SHOWN - 1} of {len(self.ranks)}; --ranks chooses others")
        missing = set(ranks) - set(self.ranks)
        if missing:
            raise ValueError(f"there is no rank {min(missing)} in this trace.")
        return Timeline(self.events, {rank: self.ranks[rank] for rank in ranks})

    def summaries(self) -> list[Summary]:
        """Return the summary of each rank."""
        return [
            summarize(self.events, rank, each["seconds"], each["memory"])
            for rank, each in self.ranks.items()
        ]


# --- the picture ------------------------------------------------------------------------------

_COLOURS = {
    "forward": "#4e79a7",
    "backward": "#76b7b2",
    "recompute": "#a0cbe8",
    "wait": "#e15759",
    "communication": "#f1a340",
    "optimizer": "#59a14f",
    "comm_hook": "#9c755f",
    "copy_to_device": "#b07aa1",
    "copy_to_host": "#d4a6c8",
}
_NAMES = {"wait": "exposed wait", "comm_hook": "communication hook"}
_WIDTH = 14.0  # inches
_CHARACTER = 0.075  # inches per character of a label


def draw(timeline: Timeline, output: str | os.PathLike[str]) -> None:
    """Draw the lanes of each rank, and bytes alive, into a file of a type that matplotlib writes.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # an extra
        from matplotlib.patches import Patch  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib (pip install matplotlib); without -o the summary is "
            "printed, and https://ui.perfetto.dev opens the file."
        ) from error
    by_rank = {rank: _Drawn(timeline.events, rank) for rank in timeline.ranks}
    heights = [height for each in by_rank.values() for height in (0.3 * len(each.lanes) + 0.5, 0.8)]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.2), layout="constrained")
    plots = figure.subplots(2 * len(by_rank), sharex=True, height_ratios=heights, squeeze=False)
    seen: dict[str, None] = {}
    last = max((each.ended for each in by_rank.values()), default=1.0)
    for (rank, drawn), lanes, memory in zip(
        by_rank.items(), plots[::2, 0], plots[1::2, 0], strict=True
    ):
        lanes.set_title(f"rank {rank}", loc="left", fontsize=10)
        lanes.set_yticks(range(len(drawn.lanes)), list(drawn.lanes.values()), fontsize=8)
        lanes.invert_yaxis()
        lanes.tick_params(axis="x", labelbottom=False)
        for row, thread in enumerate(drawn.lanes):
            for category, spans in drawn.spans_of(thread).items():
                seen[category] = None
                ranges = [(each["ts"] / 1000, each["dur"] / 1000) for each in spans]
                lanes.broken_barh(
                    ranges,
                    (row - 0.4, 0.8),
                    color=_COLOURS[category],
                    edgecolor="white",
                    linewidth=0.3,
                )
                for (began, length), each in zip(ranges, spans, strict=True):
                    text = each["args"].get("unit", each["name"])
                    if length / last * (_WIDTH - 2.5) > _CHARACTER * len(text) + 0.06:
                        lanes.text(
                            began + length / 2, row, text, ha="center", va="center", fontsize=7
                        )
        memory.plot(
            drawn.times, drawn.mebibytes, drawstyle="steps-post", color="#555555", linewidth=1
        )
        memory.set_ylabel("MiB", fontsize=8)
        memory.tick_params(labelsize=8)
        kind = timeline.ranks[rank]["memory"]
        if kind:
            memory.set_title(kind, loc="left", fontsize=8, pad=3)
    plots[-1, 0].set_xlabel("milliseconds since the trace began")
    plots[-1, 0].set_xlim(0, last)
    patches = [
        Patch(color=_COLOURS[each], label=_NAMES.get(each, each.replace("_", " ")))
        for each in _COLOURS
        if each in seen
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
    figure.savefig(output, dpi=110)


class _Drawn:
    """What is drawn of one rank."""

    def __init__(self, events: Events, rank: int) -> None:
        own = [each for each in events if each["pid"] == rank]
        self._spans = [each for each in own if each["ph"] == "X"]
        self.lanes = {
            each["tid"]: each["args"]["name"] for each in own if each["name"] == "thread_name"
        }
        samples = [each for each in own if each["ph"] == "C"]
        self.times = [each["ts"] / 1000 for each in samples]  # milliseconds
        self.mebibytes = [each["args"]["bytes"] / 2**20 for each in samples]
        self.ended = max((each["ts"] + each["dur"] for each in self._spans), default=0.0) / 1000

    def spans_of(self, thread: int) -> dict[str, list[Mapping[str, Any]]]:
        """Return the spans of a lane by category."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for each in self._spans:
            if each["tid"] == thread:
                found.setdefault(each["cat"], []).append(each)
        return found
