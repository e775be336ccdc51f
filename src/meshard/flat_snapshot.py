"""Has anything been edited since the last step of a flat optimizer?

What users see as the state of a parameter is a view of that of its run, so edits in place need no
notice. What is replaced does. That is thousands of objects to look at in every step, so they are
compared by identity, in loops that run in C.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from meshard._params.dtensors import local_of, locals_of
from meshard._params.shard_storage import with_storage_of_its_own
from meshard.flat_run import Run, State

_VERSION = attrgetter("_version")
_PARAMS = itemgetter("params")
Groups = Sequence[dict[str, Any]]


class Counters:
    """What the members of runs have of a state without dims: each a number of its own.

    An ordinary optimizer adds 1 to each of them; here they follow those of the runs.

    Args:
        of_runs: One number per run, on one device.
        runs: As many.
    """

    def __init__(self, of_runs: Sequence[torch.Tensor], runs: Sequence[Run]) -> None:
        self._of_runs = torch.stack(list(of_runs))
        self.of_runs = list(self._of_runs.unbind())
        device = self._of_runs.device
        sizes = torch.tensor([len(run.members) for run in runs], device=device)
        self._places = torch.arange(len(runs), device=device).repeat_interleave(sizes)
        self._expected = self._of_runs.index_select(0, self._places)
        self._values = self._expected.clone()
        self.of_members = [with_storage_of_its_own(each) for each in self._values.unbind()]
        self._version: int = sum(map(_VERSION, self.of_members))

    def follow(self) -> None:
        """Give every member the number that its run has now."""
        self._expected = self._of_runs.index_select(0, self._places)
        self._values.copy_(self._expected)

    def is_edited(self) -> bool:
        """Whether users have written to one."""
        if self._values.is_cpu:
            return not torch.equal(self._values, self._expected)
        # To read them would wait for the device. So an edit by ``.data`` is not seen there.
        version: int = sum(map(_VERSION, self.of_members))
        return version != self._version


class _Entries(NamedTuple):
    """The state of several parameters under one key."""

    key: str
    states: list[State]
    values: list[Any]


class Snapshot:
    """What a step has left: which objects, not which values.

    Args:
        groups: The param groups.
        state: Of all their parameters, and maybe of others.
        runs: What was stepped as one.
        inner: The state of the runs, and of what was stepped by itself.
    """

    def __init__(
        self,
        groups: Groups,
        state: Mapping[torch.Tensor, State],
        runs: Sequence[Run],
        inner: Mapping[torch.Tensor, State],
    ) -> None:
        self._groups = [list(group["params"]) for group in groups]
        self._states = list(map(state.get, chain.from_iterable(self._groups)))
        self._sharded = [member.param for run in runs for member in run.members]
        self._locals = list(locals_of(self._sharded))
        self._inner = inner
        self._counters = _count(runs, inner)
        self._inner_values = self._values_inside()
        self._entries = _entries_of(runs, inner)
        views = [value for each in self._entries for value in each.values]
        self._views = [view for view in views if isinstance(view, torch.Tensor) and view.dim()]
        self._shown = [local_of(view) for view in self._views]

    def holds(self, groups: Groups, state: Mapping[torch.Tensor, State]) -> bool:
        """Whether param groups, parameters and their states are what they were."""
        return (
            len(groups) == len(self._groups)
            and all(map(_are_same, map(_PARAMS, groups), self._groups))
            and all(map(is_, map(state.get, chain.from_iterable(self._groups)), self._states))
            and all(map(is_, locals_of(self._sharded), self._locals))
            and all(map(_are_as_shown, self._entries))
            and all(map(is_, locals_of(self._views), self._shown))
            and not any(counters.is_edited() for counters in self._counters)
        )

    def holds_params(self) -> bool:
        """Whether the parameters are what they were; of a state that nobody has seen."""
        return all(map(is_, locals_of(self._sharded), self._locals))

    def was_stepped_in_place(self) -> bool:
        """Whether the state of the runs is what it was, with other values."""
        return _are_same(self._values_inside(), self._inner_values)

    def _values_inside(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._inner.values())))

    def follow(self) -> None:
        """Let every parameter count as its run has."""
        for counters in self._counters:
            counters.follow()


def _are_same(found: Collection[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _are_as_shown(entries: _Entries) -> bool:
    try:
        return all(map(is_, map(itemgetter(entries.key), entries.states), entries.values))
    except KeyError:
        return False


def _states_of(runs: Iterable[Run]) -> list[State]:
    return [state for run in runs for state in run.states]


def _count(runs: Sequence[Run], inner: Mapping[torch.Tensor, State]) -> list[Counters]:
    """Show every member of ``runs`` counters of its own."""
    alike: dict[tuple[str, torch.device, torch.dtype], list[Run]] = {}
    for run in runs:
        for key, value in inner.get(run.flat, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                alike.setdefault((key, value.device, value.dtype), []).append(run)
    made = []
    for (key, _, _), counted in alike.items():
        counters = Counters([inner[run.flat][key] for run in counted], counted)
        for run, value in zip(counted, counters.of_runs, strict=True):
            inner[run.flat][key] = value
        for state, value in zip(_states_of(counted), counters.of_members, strict=True):
            state[key] = value
        made.append(counters)
    return made


def _entries_of(runs: Sequence[Run], inner: Mapping[torch.Tensor, State]) -> list[_Entries]:
    having: dict[str, list[Run]] = {}
    for run in runs:
        for key in inner.get(run.flat, {}):
            having.setdefault(key, []).append(run)
    entries = []
    for key, each in having.items():
        states = _states_of(each)
        entries.append(_Entries(key, states, [state[key] for state in states]))
    return entries
