"""Measure how fast a machine runs a job, for plans of other settings."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from os import PathLike
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from meshard._comm import spans
from meshard._comm.blocking import gather_objects
from meshard._comm.communicator import CommEvent, observers
from meshard.optim.overlap import Worker
from meshard.planning.phantom import KernelMode, submit_inline
from meshard.planning.tape import Collective, Key, WorkRecorder
from meshard.planning.timing import Link, MeasuredWork, Profile
from meshard.tracing import Part, Recording, all_ranks, disjoint, resolved


def measure(
    step: Callable[[], object],
    *,
    steps: int = 5,
    ranks_per_node: int = 8,
    path: str | PathLike[str] | None = None,
) -> Profile:
    """Run steps of a real job, and find out how fast its units and its network are.

    ``plan(job, profile=...)`` then says how long a step takes with other settings: other meshes,
    other ranks, another depth. Two steps go before those that are measured; in the second one each
    kernel is counted, without compiled code, so it is slow.

    **Collective:** on all ranks of the default process group.

    Args:
        step: Runs one whole step.
        steps: How many are measured.
        ranks_per_node: How many ranks share a node, as for ``plan``.
        path: Of a file in which the first rank saves the profile; None: it is not saved.

    Returns:
        The profile, the same on all ranks. Compute is the mean of the ranks. A collective takes as
        long as on the rank that began it last, because others have waited for that one. If ranks
        issue different collectives, as stages of a pipeline do, those of the first rank count.

    Raises:
        RuntimeError: No module of meshard ran in ``step``; a trace is active; or the step is not
            the same each time.
        TypeError: ``step`` is no function.
        ValueError: A number is smaller than 1.

    >>> import torch, meshard
    >>> from meshard.planning import measure
    >>> model = meshard.fully_shard(torch.nn.Linear(64, 64))
    >>> profile = measure(lambda: model(torch.ones(8, 64)).sum().backward(), steps=3)
    >>> len(profile.steps), {each.phase for each in profile.work} >= {"forward", "backward"}
    (3, True)
    """
    if not callable(step):
        raise TypeError(f"step must be a function that runs one step, got {step!r}.")
    if steps < 1 or ranks_per_node < 1:
        raise ValueError(
            f"measure() needs steps >= 1 and ranks_per_node >= 1; got {steps=}, {ranks_per_node=}."
        )
    step()
    work, clock = _count(step)
    recording, marks = Recording(), []
    groups: dict[int, list[int]] = {}  # the ranks of the group of each collective

    def observe(event: CommEvent, group: dist.ProcessGroup, _: object) -> None:
        groups[id(event)] = dist.get_process_group_ranks(group)

    spans.start(recording)
    observers.append(observe)
    try:
        for _ in range(steps):
            marks.append(clock.now())
            step()
        marks.append(clock.now())
    finally:
        observers.remove(observe)
        spans.stop()
    part, when = resolved(recording), clock.settle()
    uncounted = ""
    for phase in ("forward", "backward"):
        has_run = any(piece.category == phase for piece in part.pieces)
        if has_run and not any(amount for (each, _), amount in work.items() if each == phase):
            uncounted = phase
    moments = list(map(when, marks))
    lengths = [end - begin for begin, end in itertools.pairwise(moments)]
    sent = _collectives_of(recording, part, groups, ranks_per_node)
    seconds = _seconds_of(recording, part, sum(lengths), steps)
    own = _Measured(seconds, work, sent, lengths, uncounted)
    group = all_ranks()
    every = [own] if group is None else gather_objects(own, group, label="(profile)")
    uncounted = next((each.uncounted for each in every if each.uncounted), "")
    if uncounted:
        raise RuntimeError(
            f"measure() needs a step that does the same each time: the second one, which was "
            f"counted, ran no kernel in {uncounted}, and those after it did."
        )
    device: torch.device | None = torch.device("cpu")
    if clock is not spans.HOST:  # streams of a rehearsal may have no device
        device = torch.accelerator.current_accelerator(check_available=True)
    profile = _profile_of(every, "" if device is None else device.type)
    if path is not None and (group is None or group.rank() == 0):
        profile.save(path)
    return profile


class _Measured(NamedTuple):
    """What one rank has measured."""

    seconds: dict[Key, float]
    work: dict[Key, float]
    collectives: list[tuple[Collective, float]]
    steps: list[float]
    uncounted: str = ""  # a phase in which kernels ran, but not in the step that was counted


def _count(step: Callable[[], object]) -> tuple[dict[Key, float], spans.Clock]:
    """Run a step; return the work of each phase of each unit, and the clock of compute."""
    work: defaultdict[Key, float] = defaultdict(float)

    def add(key: Key, amount: float) -> None:
        work[key] += amount

    recorder = WorkRecorder(add)
    spans.start(recorder)
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            mock.patch.object(Worker, "submit", submit_inline),
            KernelMode(recorder.kernel),
        ):
            step()
    finally:
        spans.stop()
    if recorder.clock is None:
        raise RuntimeError(
            "measure() needs a step that runs a module of fully_shard or replicate; none ran."
        )
    return dict(work), recorder.clock


def _seconds_of(recording: Recording, part: Part, seconds: float, steps: int) -> dict[Key, float]:
    """Return the seconds of each phase of each unit in a step. What is left is outside of units."""
    beside_phases = [
        each
        for each in recording.spans
        if each.event is None and not each.is_beside and None not in (each.began, each.ended)
    ]
    clocks = {clock: clock.settle() for clock in {each.clock for each in beside_phases}}
    known = [
        (clocks[each.clock](each.began), clocks[each.clock](each.ended)) for each in beside_phases
    ]
    waits = [(each.began, each.ended) for each in part.pieces if each.category == "wait"]
    found: defaultdict[Key, float] = defaultdict(float)
    for piece in part.pieces:
        if piece.category in ("communication", "wait"):
            continue
        length = piece.ended - piece.began
        if "unit" in piece.args:  # a phase, from which its waits are cut out already
            known.append((piece.began, piece.ended))
            found[piece.category, piece.args["unit"]] += length / steps
        else:
            inside = (min(end, piece.ended) - max(begin, piece.began) for begin, end in waits)
            length -= sum(each for each in inside if each > 0)
            found[piece.category, piece.name] += length / steps
    in_units = sum(ended - began for began, ended in disjoint([*known, *waits]))
    found["", ""] = max(0.0, seconds - in_units) / steps
    return dict(found)


def _collectives_of(
    recording: Recording, part: Part, groups: dict[int, list[int]], ranks_per_node: int
) -> list[tuple[Collective, float]]:
    """Return each collective, and how long it took. Those of a group follow each other."""
    events = [each.event for each in recording.spans if each.event and each.began is not None]
    pieces = [each for each in part.pieces if each.category == "communication"]
    found, free = [], dict[tuple[int, ...], float]()  # when the last one in a group has ended
    for event, piece in zip(events, pieces, strict=True):
        ranks = groups.get(id(event))
        if ranks is not None:
            key = tuple(ranks)
            began = max(piece.began, free.get(key, 0.0))
            free[key] = piece.ended
            found.append((Collective.of(event, ranks, ranks_per_node), piece.ended - began))
    return found


def _profile_of(every: Sequence[_Measured], device_type: str) -> Profile:
    work = []
    for key in dict.fromkeys(key for each in every for key in each.seconds):
        seconds = statistics.fmean(each.seconds.get(key, 0.0) for each in every)
        amount = statistics.fmean(each.work.get(key, 0.0) for each in every)
        work.append(MeasuredWork(*key, seconds, amount))
    sent: defaultdict[bool, list[tuple[Collective, float]]] = defaultdict(list)
    issued = [[(c.op, c.unit, c.payload_bytes) for c, _ in each.collectives] for each in every]
    if all(each == issued[0] for each in issued):
        for same in zip(*(each.collectives for each in every), strict=True):
            collective = same[0][0]
            sent[collective.is_between_nodes].append((collective, min(took for _, took in same)))
    else:
        for collective, took in every[0].collectives:
            sent[collective.is_between_nodes].append((collective, took))
    # A step is as long as on the rank that is slowest.
    steps = [max(lengths) for lengths in zip(*(each.steps for each in every), strict=True)]
    return Profile(work, _link(sent[False]), _link(sent[True]), steps, device_type)


def _link(sent: Sequence[tuple[Collective, float]]) -> Link | None:
    """Return the link that explains best how long collectives took, by their median times."""
    by_size: defaultdict[Collective, list[float]] = defaultdict(list)
    for collective, took in sent:
        by_size[collective].append(took)
    points = [
        (each.hops, each.wire_bytes, statistics.median(took))
        for each, took in by_size.items()
        if each.wire_bytes
    ]
    if not points:
        return None
    latency, per_byte = _fitted(points)
    link = Link(1 / max(per_byte, 1e-15), latency)
    off = [abs(took / link.seconds(each) - 1) for each, took in sent if each.wire_bytes]
    return Link(link.bytes_per_second, latency, statistics.median(off))


def _fitted(points: Sequence[tuple[float, int, float]]) -> tuple[float, float]:
    """Return seconds per hop and per byte, with the least squares of relative errors.

    Both are at least zero: without a second size, all the time is that of the bytes.
    """
    rows = [(hops / took, size / took) for hops, size, took in points if took > 0]
    if not rows:
        return 0.0, 0.0
    a, b = (sum(row[i] * row[i] for row in rows) for i in (0, 1))
    c, p, q = (sum(each) for each in zip(*((h * s, h, s) for h, s in rows), strict=True))
    determinant = a * b - c * c
    if determinant > 1e-9 * a * b:
        latency, per_byte = (p * b - q * c) / determinant, (q * a - p * c) / determinant
        if latency >= 0 and per_byte >= 0:
            return latency, per_byte
        if per_byte < 0:
            return p / a, 0.0
    return 0.0, q / b
